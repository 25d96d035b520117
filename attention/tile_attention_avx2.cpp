#include "attention/tile_attention_kernel.h"
#include "attention/tile_attention_sets.h"

namespace birkhoff {

const TileKernels<float>& tile_kernels_avx2(float) { return kKernels<float>; }
const TileKernels<double>& tile_kernels_avx2(double) { return kKernels<double>; }

}  // namespace birkhoff
