// The GPU kernels for residual addition and layer norm, run on the CPU, against the specification.
#include <gtest/gtest.h>

#include <limits>

#include "cluster/base/gpu/device.h"
#include "tests/models/residual_norm/norm_check.h"
#include "tests/models/residual_norm/norm_emulated.h"

namespace birkhoff {
namespace {

// Memory that no kernel has written yet.
at::Tensor poisoned(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::full(sizes, std::numeric_limits<double>::quiet_NaN(), dtype);
}

const float* floats(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

ResidualNorm norm(const at::Tensor& x_NC, const at::Tensor& y_NC, const at::Tensor& weight_C,
                  const at::Tensor& bias_C, double epsilon, at::ScalarType branch) {
  const bool adds = y_NC.defined();
  const ResidualNorm result{adds ? poisoned(x_NC.sizes(), at::kFloat) : x_NC,
                            poisoned(x_NC.sizes(), branch), poisoned({x_NC.size(0)}, at::kFloat),
                            poisoned({x_NC.size(0)}, at::kFloat)};
  emulate_residual_norm({.branch_dtype = kernel_dtype(result.normed_NC),
                         .rows = x_NC.size(0),
                         .channels = x_NC.size(1),
                         .x = floats(x_NC),
                         .y = adds ? y_NC.const_data_ptr() : nullptr,
                         .weight = floats(weight_C),
                         .bias = floats(bias_C),
                         .epsilon = static_cast<float>(epsilon),
                         .sum = adds ? result.sum_NC.mutable_data_ptr<float>() : nullptr,
                         .normed = result.normed_NC.mutable_data_ptr(),
                         .mean = result.mean_N.mutable_data_ptr<float>(),
                         .rstd = result.rstd_N.mutable_data_ptr<float>()});
  return result;
}

ResidualNormGradients norm_backward(const at::Tensor& d_sum_NC, const at::Tensor& d_normed_NC,
                                    const ResidualNorm& forward, const at::Tensor& weight_C,
                                    ResidualNormTerms terms) {
  const std::int64_t rows = d_sum_NC.size(0), channels = d_sum_NC.size(1);
  const at::Tensor partials =
      poisoned({ResidualNormBackwardParams::parts(rows, channels), 2, channels}, at::kFloat);
  ResidualNormGradients result{poisoned(d_sum_NC.sizes(), at::kFloat),
                               {},
                               poisoned({channels}, at::kFloat),
                               terms.bias ? poisoned({channels}, at::kFloat) : at::Tensor()};
  if (terms.branch) result.d_y_NC = poisoned(d_sum_NC.sizes(), d_normed_NC.scalar_type());
  emulate_residual_norm_backward(
      {.branch_dtype = kernel_dtype(d_normed_NC),
       .rows = rows,
       .channels = channels,
       .d_sum = floats(d_sum_NC),
       .d_normed = d_normed_NC.const_data_ptr(),
       .sum = floats(forward.sum_NC),
       .mean = floats(forward.mean_N),
       .rstd = floats(forward.rstd_N),
       .weight = floats(weight_C),
       .d_x = result.d_x_NC.mutable_data_ptr<float>(),
       .d_y = terms.branch ? result.d_y_NC.mutable_data_ptr() : nullptr,
       .partials = partials.mutable_data_ptr<float>(),
       .d_weight = result.d_weight_C.mutable_data_ptr<float>(),
       .d_bias = terms.bias ? result.d_bias_C.mutable_data_ptr<float>() : nullptr});
  return result;
}

TEST(EmulatedResidualNorm, IsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool branch : {true, false}) {
      for (const std::int64_t channels : {8, 128, 136, 768, 2048}) {
        check_norm({3, channels, dtype, {branch, true}}, at::kCPU, at::kCPU, norm, norm_backward);
      }
    }
  }
  check_norm({2, 8192, at::kBFloat16}, at::kCPU, at::kCPU, norm, norm_backward);
  // More rows than the most parts that rows are summed in.
  const ResidualNormTerms no_bias{.branch = true, .bias = false};
  check_norm({515, 516, at::kBFloat16, no_bias}, at::kCPU, at::kCPU, norm, norm_backward);
}

}  // namespace
}  // namespace birkhoff
