#include "models/transformer/residual_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"
#include "models/transformer/gpu_residual_norm_params.h"

namespace birkhoff {
namespace {

// `stream`: a tensor of the residual stream. `tensor` must have its dtype; a tensor of a branch may
// also be bf16 or fp16.
void check_alike(const at::Tensor& tensor, const at::Tensor& stream_NC, bool of_branch) {
  const at::ScalarType dtype = tensor.scalar_type();
  require(tensor.is_contiguous() && tensor.device() == stream_NC.device() &&
              tensor.size(-1) == stream_NC.size(1) &&
              (tensor.dim() == 1 || tensor.sizes() == stream_NC.sizes()) &&
              (dtype == stream_NC.scalar_type() ||
               (of_branch && (dtype == at::kBFloat16 || dtype == at::kHalf))),
          "residual_norm: tensors must be contiguous, [N, C] or [C], on one device and of matching "
          "dtypes");
}

// Whether the kernels can take tensors of these shapes and addresses; LibTorch operations take the
// others. The first tensor belongs to the residual stream.
bool has_kernel(std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& stream_NC = *tensors.begin();
  const std::int64_t channels = stream_NC.size(1);
  bool fits = kHasGpuKernels && stream_NC.is_cuda() && stream_NC.scalar_type() == at::kFloat &&
              channels <= ResidualNormParams::kMaxChannels;
  for (const at::Tensor& tensor : tensors) {
    fits = fits && (!tensor.defined() ||
                    fits_vectors(tensor, channels * static_cast<std::int64_t>(tensor.itemsize())));
  }
  return fits;
}

ResidualNorm launch(const at::Tensor& x_NC, const at::Tensor& y_NC, const at::Tensor& weight_C,
                    const at::Tensor& bias_C, double epsilon, at::ScalarType branch) {
  ResidualNorm result{y_NC.defined() ? at::empty_like(x_NC) : x_NC,
                      at::empty(x_NC.sizes(), x_NC.options().dtype(branch)),
                      at::empty({x_NC.size(0)}, x_NC.options()),
                      at::empty({x_NC.size(0)}, x_NC.options())};
  if constexpr (kHasGpuKernels) {
    launch_residual_norm({.branch_dtype = kernel_dtype(result.normed_NC),
                          .rows = x_NC.size(0),
                          .channels = x_NC.size(1),
                          .x = x_NC.const_data_ptr<float>(),
                          .y = y_NC.defined() ? y_NC.const_data_ptr() : nullptr,
                          .weight = weight_C.const_data_ptr<float>(),
                          .bias = bias_C.defined() ? bias_C.const_data_ptr<float>() : nullptr,
                          .epsilon = static_cast<float>(epsilon),
                          .sum = y_NC.defined() ? result.sum_NC.mutable_data_ptr<float>() : nullptr,
                          .normed = result.normed_NC.mutable_data_ptr(),
                          .mean = result.mean_N.mutable_data_ptr<float>(),
                          .rstd = result.rstd_N.mutable_data_ptr<float>()},
                         current_stream(x_NC));
  }
  return result;
}

ResidualNormGradients launch_backward(const at::Tensor& d_sum_NC, const at::Tensor& d_normed_NC,
                                      const ResidualNorm& forward, const at::Tensor& weight_C,
                                      ResidualNormTerms terms) {
  const std::int64_t rows = d_sum_NC.size(0), channels = d_sum_NC.size(1);
  const bool rounded = d_normed_NC.scalar_type() != d_sum_NC.scalar_type();
  const at::Tensor partials = at::empty(
      {ResidualNormBackwardParams::parts(rows, channels), 2, channels}, d_sum_NC.options());
  ResidualNormGradients result{at::empty_like(d_sum_NC), at::Tensor(), at::empty_like(weight_C),
                               terms.bias ? at::empty_like(weight_C) : at::Tensor()};
  if (terms.branch) result.d_y_NC = rounded ? at::empty_like(d_normed_NC) : result.d_x_NC;
  if constexpr (kHasGpuKernels) {
    launch_residual_norm_backward(
        {.branch_dtype = kernel_dtype(d_normed_NC),
         .rows = rows,
         .channels = channels,
         .d_sum = d_sum_NC.const_data_ptr<float>(),
         .d_normed = d_normed_NC.const_data_ptr(),
         .sum = forward.sum_NC.const_data_ptr<float>(),
         .mean = forward.mean_N.const_data_ptr<float>(),
         .rstd = forward.rstd_N.const_data_ptr<float>(),
         .weight = weight_C.const_data_ptr<float>(),
         .d_x = result.d_x_NC.mutable_data_ptr<float>(),
         .d_y = terms.branch && rounded ? result.d_y_NC.mutable_data_ptr() : nullptr,
         .partials = partials.mutable_data_ptr<float>(),
         .d_weight = result.d_weight_C.mutable_data_ptr<float>(),
         .d_bias = terms.bias ? result.d_bias_C.mutable_data_ptr<float>() : nullptr},
        current_stream(d_sum_NC));
  }
  return result;
}

// An autograd function takes no undefined tensor, except as an empty optional.
struct AddAndNorm : torch::autograd::Function<AddAndNorm> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& x,
                                                const std::optional<at::Tensor>& y,
                                                const at::Tensor& weight_C,
                                                const std::optional<at::Tensor>& bias,
                                                double epsilon, at::ScalarType branch) {
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.contiguous().view({-1, weight_C.size(0)});
    };
    const ResidualNorm result = residual_norm(rows(x), y ? rows(*y) : at::Tensor(), weight_C,
                                              bias.value_or(at::Tensor()), epsilon, branch);
    const at::Tensor sum = y ? result.sum_NC.view(x.sizes()) : x;
    context->saved_data["has_branch"] = y.has_value();
    context->saved_data["has_bias"] = bias.has_value();
    context->save_for_backward({sum, result.mean_N, result.rstd_N, weight_C});
    return {sum, result.normed_NC.view(x.sizes())};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    refuse_second_gradient();
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const at::Tensor &sum = saved[0], &weight_C = saved[3];
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.contiguous().view({-1, weight_C.size(0)});
    };
    const ResidualNorm forward{rows(sum), at::Tensor(), saved[1], saved[2]};
    const ResidualNormTerms terms{.branch = context->saved_data["has_branch"].toBool(),
                                  .bias = context->saved_data["has_bias"].toBool()};
    const ResidualNormGradients result =
        residual_norm_backward(rows(gradients[0]), rows(gradients[1]), forward, weight_C, terms);
    return {result.d_x_NC.view(sum.sizes()),
            terms.branch ? result.d_y_NC.view(sum.sizes()) : at::Tensor(),
            result.d_weight_C,
            result.d_bias_C,
            {},
            {}};
  }
};

}  // namespace

ResidualNorm residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                           const at::Tensor& weight_C, const at::Tensor& bias_C, double epsilon,
                           at::ScalarType branch) {
  require(x_NC.dim() == 2, "residual_norm: x must be [N, C]");
  check_alike(x_NC, x_NC, /*of_branch=*/false);
  if (y_NC.defined()) {
    check_alike(y_NC, x_NC, /*of_branch=*/true);
    require(y_NC.scalar_type() == branch, "residual_norm: y must be in the branch's dtype");
  }
  check_alike(weight_C, x_NC, /*of_branch=*/false);
  if (bias_C.defined()) check_alike(bias_C, x_NC, /*of_branch=*/false);
  if (has_kernel({x_NC, y_NC, weight_C, bias_C})) {
    return launch(x_NC, y_NC, weight_C, bias_C, epsilon, branch);
  }
  return reference_residual_norm(x_NC, y_NC, weight_C, bias_C, epsilon, branch);
}

ResidualNormGradients residual_norm_backward(const at::Tensor& d_sum_NC,
                                             const at::Tensor& d_normed_NC,
                                             const ResidualNorm& forward,
                                             const at::Tensor& weight_C, ResidualNormTerms terms) {
  require(d_sum_NC.dim() == 2 && d_sum_NC.size(0) > 0, "residual_norm: d_sum must be [N, C]");
  check_alike(d_sum_NC, d_sum_NC, /*of_branch=*/false);
  check_alike(d_normed_NC, d_sum_NC, /*of_branch=*/true);
  check_alike(forward.sum_NC, d_sum_NC, /*of_branch=*/false);
  check_alike(weight_C, d_sum_NC, /*of_branch=*/false);
  if (has_kernel({d_sum_NC, d_normed_NC, forward.sum_NC, weight_C})) {
    return launch_backward(d_sum_NC, d_normed_NC, forward, weight_C, terms);
  }
  return reference_residual_norm_backward(d_sum_NC, d_normed_NC, forward, weight_C, terms);
}

ResidualNorm reference_residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                                     const at::Tensor& weight_C, const at::Tensor& bias_C,
                                     double epsilon, at::ScalarType branch) {
  ResidualNorm result;
  result.sum_NC = y_NC.defined() ? x_NC + y_NC : x_NC;
  const at::Tensor mean_N1 = result.sum_NC.mean(1, /*keepdim=*/true);
  const at::Tensor centred_NC = result.sum_NC - mean_N1;
  const at::Tensor rstd_N1 =
      at::rsqrt((centred_NC * centred_NC).mean(1, /*keepdim=*/true) + epsilon);
  at::Tensor normed_NC = centred_NC * rstd_N1 * weight_C;
  if (bias_C.defined()) normed_NC = normed_NC + bias_C;
  result.normed_NC = normed_NC.to(branch);
  result.mean_N = mean_N1.squeeze(1);
  result.rstd_N = rstd_N1.squeeze(1);
  return result;
}

ResidualNormGradients reference_residual_norm_backward(const at::Tensor& d_sum_NC,
                                                       const at::Tensor& d_normed_NC,
                                                       const ResidualNorm& forward,
                                                       const at::Tensor& weight_C,
                                                       ResidualNormTerms terms) {
  const at::Tensor rstd_N1 = forward.rstd_N.unsqueeze(1);
  const at::Tensor h_NC = (forward.sum_NC - forward.mean_N.unsqueeze(1)) * rstd_N1;
  const at::Tensor d_NC = d_normed_NC.to(d_sum_NC.scalar_type());
  const at::Tensor g_NC = d_NC * weight_C;
  const at::Tensor mean_g_N1 = g_NC.mean(1, /*keepdim=*/true);
  const at::Tensor mean_gh_N1 = (g_NC * h_NC).mean(1, /*keepdim=*/true);
  ResidualNormGradients result;
  result.d_x_NC = d_sum_NC + rstd_N1 * (g_NC - mean_g_N1 - h_NC * mean_gh_N1);
  if (terms.branch) result.d_y_NC = result.d_x_NC.to(d_normed_NC.scalar_type());
  result.d_weight_C = (d_NC * h_NC).sum(0);
  if (terms.bias) result.d_bias_C = d_NC.sum(0);
  return result;
}

std::pair<at::Tensor, at::Tensor> add_and_norm(const at::Tensor& x, const at::Tensor& y,
                                               const at::Tensor& weight_C, const at::Tensor& bias_C,
                                               double epsilon, at::ScalarType branch) {
  const auto if_defined = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  const torch::autograd::variable_list results =
      AddAndNorm::apply(x, if_defined(y), weight_C, if_defined(bias_C), epsilon, branch);
  return {results[0], results[1]};
}

}  // namespace birkhoff
