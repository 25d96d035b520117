// The GPU kernels of the Sinkhorn operator, run on the CPU by tests/emulated_cuda.
#include "tests/attention/kernels/sinkhorn/balance_emulated.h"

#define launch_balance emulate_launch_balance
#define launch_balance_backward emulate_launch_balance_backward
#define launch_cumulative_balance emulate_launch_cumulative_balance
#define launch_cumulative_balance_backward emulate_launch_cumulative_balance_backward
#define launch_prefix_balance emulate_launch_prefix_balance
#define launch_prefix_balance_backward emulate_launch_prefix_balance_backward
namespace birkhoff {
void launch_cumulative_balance(const BalanceParams& params, CUstream_st* stream);
void launch_cumulative_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
void launch_prefix_balance(const BalanceParams& params, CUstream_st* stream);
void launch_prefix_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
namespace small_prefix {
void launch_prefix_balance(const BalanceParams& params, CUstream_st* stream);
void launch_prefix_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
}  // namespace small_prefix
}  // namespace birkhoff
#include "attention/kernels/sinkhorn/gpu_cumulative.cu"
#include "attention/kernels/sinkhorn/gpu_launch.cu"
#include "attention/kernels/sinkhorn/gpu_prefix.cu"
#include "attention/kernels/sinkhorn/gpu_small_prefix.cu"

namespace birkhoff {
namespace {

float4 balance_memory[232448 / sizeof(float4)];

}  // namespace

void emulate_balance(const BalanceParams& params, int shared_limit) {
  const emulated::SharedLimit limit(shared_limit);
  emulate_launch_balance(params, nullptr);
}

void emulate_balance_backward(const BalanceBackwardParams& params, int shared_limit) {
  const emulated::SharedLimit limit(shared_limit);
  emulate_launch_balance_backward(params, nullptr);
}

}  // namespace birkhoff
