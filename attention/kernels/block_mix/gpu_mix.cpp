#include "attention/kernels/block_mix/gpu_mix.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/block_mix/gpu_products.h"
#include "attention/kernels/block_mix/mix_autograd.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

// The parameters that follow from the sizes of x.
BlockMixParams shape_params(const std::vector<at::Tensor>& x_BHNbD) {
  const at::Tensor& first = x_BHNbD[0];
  const auto size = [&](std::int64_t dim) { return static_cast<int>(first.size(dim)); };
  BlockMixParams params{};
  params.dtype = first.scalar_type() == at::kHalf ? KernelDtype::kHalf : KernelDtype::kBFloat16;
  params.batch = size(0);
  params.heads = size(1);
  params.blocks = size(2);
  params.block = size(3);
  params.head_dim = size(4);
  params.num_tensors = static_cast<int>(x_BHNbD.size());
  return params;
}

// The parameters that all launches share.
BlockMixParams shared_params(const MixOperands& operands) {
  const at::Tensor& weights = operands.weights;
  BlockMixParams params = shape_params(operands.x_BHNbD);
  params.diagonal = static_cast<int>(operands.diagonal);
  params.weights = static_cast<const std::uint16_t*>(weights.const_data_ptr());
  std::copy_n(weights.strides().begin() + 1, 3, params.weight_strides);
  if (operands.lengths_B.defined()) {
    params.lengths = operands.lengths_B.const_data_ptr<std::int64_t>();
    params.second_set = weights.stride(0);
  }
  std::transform(operands.x_BHNbD.begin(), operands.x_BHNbD.end(), params.x, block_rows);
  return params;
}

}  // namespace

std::string why_not_gpu_kernels(const std::vector<at::Tensor>& x_BHNbD) {
  const at::Tensor& first = x_BHNbD.at(0);
  std::string why = why_not_dtype(first.scalar_type(), {at::kBFloat16, at::kHalf});
  if (!why.empty()) return why;
  if (first.size(4) % 8 != 0) {
    return fmt::format("a head has {} channels, which are no multiple of 8", first.size(4));
  }
  if (first.size(2) < 1) return "there is no block";
  if (first.size(2) > BlockMixParams::kMaxBlocks) {
    return fmt::format("there are {} blocks, more than {}", first.size(2),
                       BlockMixParams::kMaxBlocks);
  }
  if (x_BHNbD.size() > BlockMixParams::kMaxTensors) return "more than keys and values are mixed";
  const bool fits = first.size(3) * first.size(4) <= BlockMixParams::kMaxColumns;
  return fits ? "" : "tokens of a block and channels have too large a product";
}

at::Tensor block_mix_weights(const at::Tensor& weights, at::ScalarType dtype) {
  const at::Tensor rounded = weights.to(dtype);
  const std::int64_t missing = (8 - rounded.size(-1) % 8) % 8;
  return missing == 0 ? with_aligned_rows(rounded) : at::constant_pad_nd(rounded, {0, missing}, 0);
}

BlockMixParams block_mix_params(const MixOperands& operands,
                                const std::vector<at::Tensor>& y_BHNbD) {
  BlockMixParams params = shared_params(operands);
  std::transform(y_BHNbD.begin(), y_BHNbD.end(), params.y, block_rows);
  return params;
}

BlockMixParams block_mix_params(const MixOperands& operands,
                                const std::vector<at::Tensor>& d_y_BHNbD,
                                const std::vector<at::Tensor>& others_BHNbD,
                                const std::vector<at::Tensor>& d_x_BHNbD,
                                const at::Tensor& d_weights) {
  BlockMixParams params = shared_params(operands);
  std::transform(d_y_BHNbD.begin(), d_y_BHNbD.end(), params.d_y, block_rows);
  std::transform(others_BHNbD.begin(), others_BHNbD.end(), params.others, [](const at::Tensor& x) {
    return x.defined() ? block_rows(x) : BlockRowsParams{};
  });
  std::transform(d_x_BHNbD.begin(), d_x_BHNbD.end(), params.d_x, block_rows);
  params.parts = static_cast<int>(d_weights.size(1));
  params.d_weights = d_weights.mutable_data_ptr<float>();
  return params;
}

at::Tensor new_block_mix_d_weights(const MixOperands& operands) {
  const at::Tensor& x = operands.x_BHNbD[0];
  const int parts = BlockMixShape::num_parts(shape_params(operands.x_BHNbD));
  return at::empty({operands.weights.size(0), parts, x.size(0), x.size(1), x.size(2), x.size(2)},
                   x.options().dtype(at::kFloat));
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct MixOnGpu : torch::autograd::Function<MixOnGpu> {
  // Reads the rounded weights of `operands`; the unrounded ones, S tensors, get the gradient.
  // Returns each y, then each x for its other consumers.
  static variable_list forward(AutogradContext* context, at::TensorList /*weights_BHNN*/,
                               at::TensorList x_BHNbD, MixOperands operands) {
    operands.x_BHNbD = each_of(x_BHNbD, with_aligned_rows);
    const variable_list& x = operands.x_BHNbD;
    variable_list y = each_of(x, new_blocks_like);
    const BlockMixParams params = block_mix_params(operands, y);
    if constexpr (kHasGpuKernels) launch_block_mix(params, current_stream(x[0]));
    context->saved_data["diagonal"] = operands.diagonal;
    variable_list saved = x;
    saved.insert(saved.end(), {operands.weights, operands.lengths_B});
    return mix_outputs(context, std::move(saved), std::move(y), x_BHNbD);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const MixOperands operands{.weights = saved.end()[-2],
                               .lengths_B = saved.end()[-1],
                               .x_BHNbD = {saved.begin(), saved.end() - 2},
                               .diagonal = context->saved_data["diagonal"].toInt()};
    const variable_list& x = operands.x_BHNbD;
    const MixGradients mix(gradients, x, with_aligned_rows);
    const auto& [d_y, others] = mix;
    const variable_list d_x = each_of(x, new_blocks_like);
    const at::Tensor d_weights = new_block_mix_d_weights(operands);
    const BlockMixParams params = block_mix_params(operands, d_y, others, d_x, d_weights);
    if constexpr (kHasGpuKernels) launch_block_mix_backward(params, current_stream(x[0]));
    const at::Tensor d_sets = d_weights.size(1) == 1 ? d_weights.select(1, 0) : d_weights.sum(1);
    return mix_gradients(d_sets.unbind(0), d_x);
  }
};

}  // namespace

BlockMixes mix_on_gpu(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                      std::int64_t diagonal, const at::Tensor& rounded, const MixPadding& padding) {
  const at::Tensor& x = x_BHNbD[0];
  const auto of_heads = [&](const at::Tensor& w) {
    return w.expand({x.size(0), x.size(1), -1, -1});
  };
  const auto round = [&](const at::Tensor& w) {
    return of_heads(block_mix_weights(w.detach(), x.scalar_type()));
  };
  variable_list weights{of_heads(weights_BHNN)},
      sets{rounded.defined() ? of_heads(rounded) : round(weights_BHNN)};
  if (padding.weights_BHNN.defined()) {
    weights.push_back(of_heads(padding.weights_BHNN));
    sets.push_back(round(padding.weights_BHNN));
  }
  const MixOperands operands{.weights = sets.size() == 1 ? sets[0].unsqueeze(0) : at::stack(sets),
                             .lengths_B = padding.lengths_B.defined()
                                              ? padding.lengths_B.expand({x.size(0)}).contiguous()
                                              : at::Tensor(),
                             .x_BHNbD = {},
                             .diagonal = diagonal};
  return mixes_of(MixOnGpu::apply(at::TensorList(weights), at::TensorList(x_BHNbD), operands));
}

}  // namespace birkhoff
