// Compiled once for each instruction set, BIRKHOFF_SIMD.
#include "attention/kernels/block_mix/cpu_mix_body.h"

namespace birkhoff {

constexpr InstructionSet kSet = InstructionSet::BIRKHOFF_SIMD;

template <InstructionSet, typename T>
const MixKernels<T>& compiled_mix_kernels() {
  return kMixKernels<T>;
}
#if !defined(__AVX512BF16__)
template const MixKernels<float>& compiled_mix_kernels<kSet, float>();
template const MixKernels<double>& compiled_mix_kernels<kSet, double>();
#endif
template const MixKernels<Bf16>& compiled_mix_kernels<kSet, Bf16>();

}  // namespace birkhoff
