#include "attention/block_mix_kernel.h"
#include "attention/block_mix_sets.h"

namespace birkhoff {

const MixKernels<float>& mix_kernels_avx2(float) { return kMixKernels<float>; }
const MixKernels<double>& mix_kernels_avx2(double) { return kMixKernels<double>; }
const MixKernels<Bf16>& mix_kernels_avx2(Bf16) { return kMixKernels<Bf16>; }

}  // namespace birkhoff
