#include "attention/block_mix_kernel.h"
#include "attention/block_mix_sets.h"

namespace birkhoff {

const MixKernels<Bf16>& mix_kernels_avx512_bf16(Bf16) { return kMixKernels<Bf16>; }

}  // namespace birkhoff
