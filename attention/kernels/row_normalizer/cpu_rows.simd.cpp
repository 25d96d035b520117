// Compiled once for each instruction set, BIRKHOFF_SIMD.
#include "attention/kernels/row_normalizer/cpu_rows_body.h"

namespace birkhoff {

constexpr InstructionSet kSet = InstructionSet::BIRKHOFF_SIMD;

template <InstructionSet, typename T>
const RowKernels<T>& compiled_row_kernels() {
  return kRowKernels<T>;
}
#if !defined(__AVX512BF16__)
template const RowKernels<float>& compiled_row_kernels<kSet, float>();
template const RowKernels<double>& compiled_row_kernels<kSet, double>();
template const RowKernels<Bf16>& compiled_row_kernels<kSet, Bf16>();
#endif

}  // namespace birkhoff
