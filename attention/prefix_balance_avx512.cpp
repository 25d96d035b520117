#include "attention/prefix_balance_kernel.h"
#include "attention/prefix_balance_sets.h"

namespace birkhoff {

const PrefixBalanceKernels& prefix_balance_kernels_avx512() { return kPrefixBalanceKernels; }

}  // namespace birkhoff
