#include "attention/tile_attention_kernel.h"
#include "attention/tile_attention_sets.h"

namespace birkhoff {

const TileKernels<Bf16>& tile_kernels_avx512_bf16(Bf16) { return kKernels<Bf16>; }

}  // namespace birkhoff
