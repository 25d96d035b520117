// Compiled once for each instruction set, BIRKHOFF_SIMD.
#include "attention/kernels/sinkhorn/cpu_prefix_body.h"

namespace birkhoff {

template <>
const PrefixBalanceKernels& compiled_prefix_balance_kernels<InstructionSet::BIRKHOFF_SIMD>() {
  return kPrefixBalanceKernels;
}

}  // namespace birkhoff
