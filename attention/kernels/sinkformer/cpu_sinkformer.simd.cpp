// Compiled once for each instruction set, BIRKHOFF_SIMD.
#include "attention/kernels/sinkformer/cpu_sinkformer_body.h"

namespace birkhoff {

constexpr InstructionSet kSet = InstructionSet::BIRKHOFF_SIMD;

template <InstructionSet, typename T>
const SinkformerKernels<T>& compiled_sinkformer_kernels() {
  return kSinkformerKernels<T>;
}
#if !defined(__AVX512BF16__)
template const SinkformerKernels<float>& compiled_sinkformer_kernels<kSet, float>();
template const SinkformerKernels<double>& compiled_sinkformer_kernels<kSet, double>();
template const SinkformerKernels<Bf16>& compiled_sinkformer_kernels<kSet, Bf16>();
#endif

}  // namespace birkhoff
