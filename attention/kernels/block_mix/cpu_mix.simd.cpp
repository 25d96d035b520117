// Compiled once for each instruction set, BIRKHOFF_SIMD.
#include "attention/kernels/block_mix/cpu_mix_body.h"

namespace birkhoff {

constexpr InstructionSet kSet = InstructionSet::BIRKHOFF_SIMD;

#if !defined(__AVX512BF16__)
template <>
const MixKernels<float>& compiled_mix_kernels<kSet, float>() {
  return kMixKernels<float>;
}
template <>
const MixKernels<double>& compiled_mix_kernels<kSet, double>() {
  return kMixKernels<double>;
}
#endif
template <>
const MixKernels<Bf16>& compiled_mix_kernels<kSet, Bf16>() {
  return kMixKernels<Bf16>;
}

}  // namespace birkhoff
