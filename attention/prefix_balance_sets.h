// The kernels of each instruction set.
#pragma once

#include "attention/prefix_balance_tile.h"

namespace birkhoff {

const PrefixBalanceKernels& prefix_balance_kernels_portable();
#if defined(__x86_64__)
const PrefixBalanceKernels& prefix_balance_kernels_avx2();
const PrefixBalanceKernels& prefix_balance_kernels_avx512();
#endif

}  // namespace birkhoff
