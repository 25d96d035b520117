// The kernels of each instruction set, by element type.
#pragma once

#include "attention/prefix_balance_tile.h"

namespace birkhoff {

const PrefixBalanceKernels<float>& prefix_balance_kernels_portable(float);
const PrefixBalanceKernels<double>& prefix_balance_kernels_portable(double);
#if defined(__x86_64__)
const PrefixBalanceKernels<float>& prefix_balance_kernels_avx2(float);
const PrefixBalanceKernels<double>& prefix_balance_kernels_avx2(double);
const PrefixBalanceKernels<float>& prefix_balance_kernels_avx512(float);
const PrefixBalanceKernels<double>& prefix_balance_kernels_avx512(double);
#endif

}  // namespace birkhoff
