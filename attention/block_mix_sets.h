// The kernels of each instruction set, by element type.
#pragma once

#include "attention/block_mix_tile.h"

namespace birkhoff {

const MixKernels<float>& mix_kernels_portable(float);
const MixKernels<double>& mix_kernels_portable(double);
#if defined(__x86_64__)
const MixKernels<float>& mix_kernels_avx2(float);
const MixKernels<double>& mix_kernels_avx2(double);
const MixKernels<float>& mix_kernels_avx512(float);
const MixKernels<double>& mix_kernels_avx512(double);
#endif

}  // namespace birkhoff
