// Of launch_balance and launch_balance_backward (balance_params.h) the part for prefixes of
// matrices. See attention/prefix_balance.cu.
#pragma once

#include "attention/balance_params.h"

namespace birkhoff {

// At least one matrix, with `prefix`.
void launch_prefix_balance(const BalanceParams& params, CUstream_st* stream);
void launch_prefix_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);

}  // namespace birkhoff
