#include "attention/tile_attention_kernel.h"
#include "attention/tile_attention_sets.h"

namespace birkhoff {

const TileKernels<float>& tile_kernels_avx2(float) { return kKernels<float>; }
const TileKernels<double>& tile_kernels_avx2(double) { return kKernels<double>; }
const TileKernels<Bf16>& tile_kernels_avx2(Bf16) { return kKernels<Bf16>; }

}  // namespace birkhoff
