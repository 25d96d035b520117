// Compiled once for each instruction set, BIRKHOFF_SIMD.
#include "attention/kernels/clusters/cpu_scores_body.h"

namespace birkhoff {

constexpr InstructionSet kSet = InstructionSet::BIRKHOFF_SIMD;

template <InstructionSet, typename T>
const ScoreKernels<T>& compiled_score_kernels() {
  return kScoreKernels<T>;
}
#if !defined(__AVX512BF16__)
template const ScoreKernels<float>& compiled_score_kernels<kSet, float>();
template const ScoreKernels<double>& compiled_score_kernels<kSet, double>();
template const ScoreKernels<Bf16>& compiled_score_kernels<kSet, Bf16>();
#endif

}  // namespace birkhoff
