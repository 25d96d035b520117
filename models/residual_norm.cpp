#include "models/residual_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>

#include "cluster/base/device.h"
#include "cluster/base/error.h"
#include "models/residual_norm_params.h"

namespace birkhoff {
namespace {

at::ScalarType precision_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_alike(const at::Tensor& tensor, const at::Tensor& x_NC) {
  require(tensor.is_contiguous() && tensor.scalar_type() == x_NC.scalar_type() &&
              tensor.device() == x_NC.device() && tensor.size(-1) == x_NC.size(1) &&
              (tensor.dim() == 1 || tensor.sizes() == x_NC.sizes()),
          "residual_norm: tensors must be contiguous, [N, C] or [C], of one dtype and device");
}

#ifdef BIRKHOFF_CUDA
// Shapes and places of memory that the kernels take; LibTorch's operations take the others.
bool has_kernel(std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& x_NC = *tensors.begin();
  const std::int64_t row_bytes = x_NC.size(1) * static_cast<std::int64_t>(x_NC.itemsize());
  bool fits = x_NC.is_cuda() && x_NC.scalar_type() != at::kDouble &&
              x_NC.size(1) <= ResidualNormParams::kMostChannels;
  for (const at::Tensor& tensor : tensors) {
    fits = fits && (!tensor.defined() || fits_vectors(tensor, row_bytes));
  }
  return fits;
}

ResidualNorm launch(const at::Tensor& x_NC, const at::Tensor& y_NC, const at::Tensor& weight_C,
                    const at::Tensor& bias_C, double epsilon) {
  const auto statistics = x_NC.options().dtype(at::kFloat);
  ResidualNorm result{at::empty_like(x_NC), at::empty_like(x_NC),
                      at::empty({x_NC.size(0)}, statistics), at::empty({x_NC.size(0)}, statistics)};
  launch_residual_norm({.dtype = kernel_dtype(x_NC),
                        .rows = x_NC.size(0),
                        .channels = x_NC.size(1),
                        .x = x_NC.const_data_ptr(),
                        .y = y_NC.const_data_ptr(),
                        .weight = weight_C.const_data_ptr(),
                        .bias = bias_C.defined() ? bias_C.const_data_ptr() : nullptr,
                        .epsilon = static_cast<float>(epsilon),
                        .sum = result.sum_NC.mutable_data_ptr(),
                        .normed = result.normed_NC.mutable_data_ptr(),
                        .mean = result.mean_N.mutable_data_ptr<float>(),
                        .rstd = result.rstd_N.mutable_data_ptr<float>()},
                       current_stream(x_NC));
  return result;
}

ResidualNormGradients launch_backward(const at::Tensor& d_sum_NC, const at::Tensor& d_normed_NC,
                                      const ResidualNorm& forward, const at::Tensor& weight_C,
                                      bool has_bias) {
  const std::int64_t rows = d_sum_NC.size(0), channels = d_sum_NC.size(1);
  const at::Tensor partials = at::empty({ResidualNormBackwardParams::parts(rows), 2, channels},
                                        d_sum_NC.options().dtype(at::kFloat));
  ResidualNormGradients result{at::empty_like(d_sum_NC), at::empty_like(weight_C),
                               has_bias ? at::empty_like(weight_C) : at::Tensor()};
  launch_residual_norm_backward({.dtype = kernel_dtype(d_sum_NC),
                                 .rows = rows,
                                 .channels = channels,
                                 .d_sum = d_sum_NC.const_data_ptr(),
                                 .d_normed = d_normed_NC.const_data_ptr(),
                                 .sum = forward.sum_NC.const_data_ptr(),
                                 .mean = forward.mean_N.const_data_ptr<float>(),
                                 .rstd = forward.rstd_N.const_data_ptr<float>(),
                                 .weight = weight_C.const_data_ptr(),
                                 .d_x = result.d_x_NC.mutable_data_ptr(),
                                 .partials = partials.mutable_data_ptr<float>(),
                                 .d_weight = result.d_weight_C.mutable_data_ptr(),
                                 .d_bias = has_bias ? result.d_bias_C.mutable_data_ptr() : nullptr},
                                current_stream(d_sum_NC));
  return result;
}
#endif

}  // namespace

ResidualNorm residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                           const at::Tensor& weight_C, const at::Tensor& bias_C, double epsilon) {
  require(x_NC.dim() == 2, "residual_norm: x must be [N, C]");
  check_alike(x_NC, x_NC);
  check_alike(y_NC, x_NC);
  check_alike(weight_C, x_NC);
  if (bias_C.defined()) check_alike(bias_C, x_NC);
#ifdef BIRKHOFF_CUDA
  if (has_kernel({x_NC, y_NC, weight_C, bias_C})) {
    return launch(x_NC, y_NC, weight_C, bias_C, epsilon);
  }
#endif
  return reference_residual_norm(x_NC, y_NC, weight_C, bias_C, epsilon);
}

ResidualNormGradients residual_norm_backward(const at::Tensor& d_sum_NC,
                                             const at::Tensor& d_normed_NC,
                                             const ResidualNorm& forward,
                                             const at::Tensor& weight_C, bool has_bias) {
  require(d_sum_NC.dim() == 2 && d_sum_NC.size(0) > 0, "residual_norm: d_sum must be [N, C]");
  check_alike(d_sum_NC, d_sum_NC);
  check_alike(d_normed_NC, d_sum_NC);
  check_alike(forward.sum_NC, d_sum_NC);
  check_alike(weight_C, d_sum_NC);
#ifdef BIRKHOFF_CUDA
  if (has_kernel({d_sum_NC, d_normed_NC, forward.sum_NC, weight_C})) {
    return launch_backward(d_sum_NC, d_normed_NC, forward, weight_C, has_bias);
  }
#endif
  return reference_residual_norm_backward(d_sum_NC, d_normed_NC, forward, weight_C, has_bias);
}

ResidualNorm reference_residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                                     const at::Tensor& weight_C, const at::Tensor& bias_C,
                                     double epsilon) {
  const at::ScalarType dtype = x_NC.scalar_type(), precision = precision_of(x_NC);
  ResidualNorm result;
  result.sum_NC = x_NC + y_NC;
  const at::Tensor s_NC = result.sum_NC.to(precision);
  const at::Tensor mean_N1 = s_NC.mean(1, /*keepdim=*/true);
  const at::Tensor centred_NC = s_NC - mean_N1;
  const at::Tensor rstd_N1 =
      at::rsqrt((centred_NC * centred_NC).mean(1, /*keepdim=*/true) + epsilon);
  at::Tensor normed_NC = centred_NC * rstd_N1 * weight_C.to(precision);
  if (bias_C.defined()) normed_NC = normed_NC + bias_C.to(precision);
  result.normed_NC = normed_NC.to(dtype);
  result.mean_N = mean_N1.squeeze(1);
  result.rstd_N = rstd_N1.squeeze(1);
  return result;
}

ResidualNormGradients reference_residual_norm_backward(const at::Tensor& d_sum_NC,
                                                       const at::Tensor& d_normed_NC,
                                                       const ResidualNorm& forward,
                                                       const at::Tensor& weight_C, bool has_bias) {
  const at::ScalarType dtype = d_sum_NC.scalar_type(), precision = precision_of(d_sum_NC);
  const at::Tensor rstd_N1 = forward.rstd_N.unsqueeze(1);
  const at::Tensor h_NC = (forward.sum_NC.to(precision) - forward.mean_N.unsqueeze(1)) * rstd_N1;
  const at::Tensor d_NC = d_normed_NC.to(precision);
  const at::Tensor g_NC = d_NC * weight_C.to(precision);
  const at::Tensor mean_g_N1 = g_NC.mean(1, /*keepdim=*/true);
  const at::Tensor mean_gh_N1 = (g_NC * h_NC).mean(1, /*keepdim=*/true);
  ResidualNormGradients result;
  result.d_x_NC =
      (d_sum_NC.to(precision) + rstd_N1 * (g_NC - mean_g_N1 - h_NC * mean_gh_N1)).to(dtype);
  result.d_weight_C = (d_NC * h_NC).sum(0).to(dtype);
  if (has_bias) result.d_bias_C = d_NC.sum(0).to(dtype);
  return result;
}

}  // namespace birkhoff
