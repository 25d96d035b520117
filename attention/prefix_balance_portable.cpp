#include "attention/prefix_balance_kernel.h"
#include "attention/prefix_balance_sets.h"

namespace birkhoff {

const PrefixBalanceKernels<float>& prefix_balance_kernels_portable(float) {
  return kPrefixBalanceKernels<float>;
}
const PrefixBalanceKernels<double>& prefix_balance_kernels_portable(double) {
  return kPrefixBalanceKernels<double>;
}

}  // namespace birkhoff
