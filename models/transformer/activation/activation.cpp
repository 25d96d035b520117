#include "models/transformer/activation/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/relu.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x itself, or a copy that kernels can move 16 bytes at a time.
at::Tensor in_vectors(const at::Tensor& x) {
  const at::Tensor rows = x.contiguous();
  return fits_vectors(rows, 0) ? rows : rows.clone();
}

// Of x that in_vectors() returned.
ActivationParams params_of(ActivationKind kind, const at::Tensor& x, const at::Tensor& bias) {
  return {.kind = kind,
          .dtype = kernel_dtype(x),
          .rows = x.numel() / x.size(-1),
          .width = static_cast<int>(x.size(-1)) / ActivationParams::num_halves(kind),
          .x = x.const_data_ptr(),
          .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
          .y = nullptr,
          .d_y = nullptr,
          .d_x = nullptr,
          .partials = nullptr};
}

bool has_kernel(ActivationKind kind, const at::Tensor& x, const at::Tensor& bias) {
  const at::ScalarType dtype = x.scalar_type();
  const bool has_type = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  return kHasGpuKernels && x.is_cuda() && has_type && x.numel() > 0 &&
         x.size(-1) % (ActivationParams::num_halves(kind) * ActivationParams::kMultiple) == 0 &&
         (!bias.defined() || bias.scalar_type() == at::kFloat);
}

// An autograd function takes no undefined tensor, except as an empty optional.
struct Activate : torch::autograd::Function<Activate> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const std::optional<at::Tensor>& bias, ActivationKind kind) {
    const at::Tensor x = in_vectors(given), bias_F = bias ? bias->contiguous() : at::Tensor();
    ActivationParams params = params_of(kind, x, bias_F);
    std::vector<std::int64_t> sizes = x.sizes().vec();
    sizes.back() = params.width;
    const at::Tensor y = at::empty(sizes, x.options());
    params.y = y.mutable_data_ptr();
    if constexpr (kHasGpuKernels) launch_activation(params, current_stream(x));
    context->save_for_backward({x, bias_F});
    context->saved_data["kind"] = static_cast<std::int64_t>(kind);
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &bias_F = saved[1], d_y = in_vectors(gradients[0]);
    const auto kind = static_cast<ActivationKind>(context->saved_data["kind"].toInt());
    ActivationParams params = params_of(kind, x, bias_F);
    const at::Tensor d_x = at::empty_like(x);
    params.d_y = d_y.const_data_ptr();
    params.d_x = d_x.mutable_data_ptr();
    at::Tensor partials_PF;
    if (bias_F.defined()) {
      partials_PF = at::empty({params.parts(), params.columns()}, bias_F.options());
      params.partials = partials_PF.mutable_data_ptr<float>();
    }
    if constexpr (kHasGpuKernels) launch_activation_backward(params, current_stream(x));
    return {d_x, bias_F.defined() ? partials_PF.sum(0) : at::Tensor(), {}};
  }
};

}  // namespace

at::Tensor activate(ActivationKind kind, const at::Tensor& x, const at::Tensor& bias) {
  if (has_kernel(kind, x, bias)) {
    return Activate::apply(x, bias.defined() ? std::optional(bias) : std::nullopt, kind);
  }
  const at::Tensor sum = bias.defined() ? x + bias.to(x.scalar_type()) : x;
  switch (kind) {
    case ActivationKind::kRelu:
      return at::relu(sum);
    case ActivationKind::kGelu:
      return birkhoff::gelu(sum);
    case ActivationKind::kGeglu: {
      const std::vector<at::Tensor> halves = sum.chunk(2, -1);
      return birkhoff::gelu(halves[0]) * halves[1];
    }
  }
  require(false, "activate: a kind outside its enum");
  return {};
}

}  // namespace birkhoff
