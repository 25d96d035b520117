#include "cluster/base/tensors/rounded_linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "cluster/base/error.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x weight^T + bias, which are rounded to the dtype of x.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_OI, const at::Tensor& bias_O) {
  const auto bias = bias_O.defined() ? std::optional(bias_O.to(x.scalar_type())) : std::nullopt;
  return at::linear(x, weight_OI.to(x.scalar_type()), bias);
}

// `bias`: none or one.
struct RoundedLinear : torch::autograd::Function<RoundedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight_OI, at::TensorList bias_O) {
    const at::Tensor rounded_OI = weight_OI.to(x.scalar_type());
    context->save_for_backward({weight_OI.requires_grad() ? x : at::Tensor(),
                                x.requires_grad() ? rounded_OI : at::Tensor()});
    context->saved_data["dtype"] = weight_OI.scalar_type();
    context->saved_data["bias"] = !bias_O.empty();
    return linear(x, rounded_OI, bias_O.empty() ? at::Tensor() : bias_O[0]);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight_OI = saved[1], &d_y = gradients[0];
    const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
    const at::Tensor d_y_NO = d_y.reshape({-1, d_y.size(-1)});
    variable_list result(2);
    if (context->needs_input_grad(0)) result[0] = at::matmul(d_y, weight_OI);
    if (context->needs_input_grad(1)) {
      result[1] = weight_gradient(d_y_NO, x.reshape({-1, x.size(-1)}), dtype);
    }
    if (context->saved_data["bias"].toBool()) {
      result.push_back(context->needs_input_grad(2) ? bias_gradient(d_y_NO, dtype) : at::Tensor());
    }
    return result;
  }
};

}  // namespace

at::Tensor rounded_linear(const at::Tensor& x, const at::Tensor& weight_OI,
                          const at::Tensor& bias_O) {
  if (weight_OI.scalar_type() == x.scalar_type() || !c10::GradMode::is_enabled()) {
    return linear(x, weight_OI, bias_O);
  }
  return RoundedLinear::apply(x, weight_OI,
                              bias_O.defined() ? at::TensorList(bias_O) : at::TensorList());
}

at::Tensor weight_gradient(const at::Tensor& d_y_NO, const at::Tensor& x_NI, at::ScalarType dtype) {
  const bool widens = dtype != d_y_NO.scalar_type();
  require(!widens || dtype == at::kFloat, "gradients of weights are in fp32 or in d_y's dtype");
  if (widens && d_y_NO.is_cuda()) return at::mm(d_y_NO.t(), x_NI, dtype);
  return at::mm(d_y_NO.t(), x_NI).to(dtype);
}

at::Tensor bias_gradient(const at::Tensor& d_y_NO, at::ScalarType dtype) {
  return d_y_NO.is_cuda() ? d_y_NO.sum(0, /*keepdim=*/false, dtype) : d_y_NO.sum(0).to(dtype);
}

}  // namespace birkhoff
