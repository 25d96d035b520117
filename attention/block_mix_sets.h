// The kernels of each instruction set, by element type.
#pragma once

#include "attention/block_mix_tile.h"

namespace birkhoff {

const MixKernels<float>& mix_kernels_portable(float);
const MixKernels<double>& mix_kernels_portable(double);
const MixKernels<Bf16>& mix_kernels_portable(Bf16);
#if defined(__x86_64__)
const MixKernels<float>& mix_kernels_avx2(float);
const MixKernels<double>& mix_kernels_avx2(double);
const MixKernels<Bf16>& mix_kernels_avx2(Bf16);
const MixKernels<float>& mix_kernels_avx512(float);
const MixKernels<double>& mix_kernels_avx512(double);
const MixKernels<Bf16>& mix_kernels_avx512(Bf16);
const MixKernels<Bf16>& mix_kernels_avx512_bf16(Bf16);
#endif

}  // namespace birkhoff
