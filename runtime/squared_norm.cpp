#include "runtime/squared_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "cluster/base/device.h"
#include "cluster/base/error.h"
#include "runtime/fixed_order.h"
#include "runtime/squared_norm_params.h"

namespace birkhoff {
namespace {

#ifdef BIRKHOFF_CUDA
void launch(const at::Tensor& x_n, at::Tensor& total_1) {
  require(x_n.scalar_type() == at::kFloat || x_n.scalar_type() == at::kBFloat16,
          "add_squared_norm: on a GPU x must be fp32 or bf16");
  const std::int64_t num_blocks =
      (x_n.numel() + SquaredNormParams::kBlock - 1) / SquaredNormParams::kBlock;
  const at::Tensor block_sums = at::empty({num_blocks}, total_1.options());
  launch_squared_norm({.x = x_n.const_data_ptr(),
                       .dtype = kernel_dtype(x_n),
                       .elements = x_n.numel(),
                       .block_sums = block_sums.mutable_data_ptr<double>(),
                       .total = total_1.mutable_data_ptr<double>()},
                      current_stream(x_n));
}
#endif

}  // namespace

void add_squared_norm(const at::Tensor& x_n, at::Tensor total_1) {
  require(x_n.is_contiguous() && total_1.scalar_type() == at::kDouble && total_1.numel() == 1 &&
              x_n.device() == total_1.device(),
          "add_squared_norm: x must be contiguous, the total one fp64 on its device");
#ifdef BIRKHOFF_CUDA
  if (x_n.is_cuda()) return launch(x_n, total_1);
#endif
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x_n.scalar_type(), "add_squared_norm", [&] {
    *total_1.mutable_data_ptr<double>() +=
        sum_of_squares(x_n.const_data_ptr<scalar_t>(), x_n.numel());
  });
}

}  // namespace birkhoff
