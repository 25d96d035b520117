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
BlockMixParams shared_params(const at::Tensor& weights, const std::vector<at::Tensor>& x_BHNbD,
                             std::int64_t diagonal) {
  BlockMixParams params = shape_params(x_BHNbD);
  params.diagonal = static_cast<int>(diagonal);
  params.weights = static_cast<const std::uint16_t*>(weights.const_data_ptr());
  std::copy_n(weights.strides().begin(), 3, params.weight_strides);
  std::transform(x_BHNbD.begin(), x_BHNbD.end(), params.x, block_rows);
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

at::Tensor block_mix_weights(const at::Tensor& weights_BHNN, at::ScalarType dtype) {
  const at::Tensor rounded = weights_BHNN.to(dtype);
  const std::int64_t missing = (8 - rounded.size(3) % 8) % 8;
  return missing == 0 ? with_aligned_rows(rounded) : at::constant_pad_nd(rounded, {0, missing}, 0);
}

BlockMixParams block_mix_params(const at::Tensor& weights, const std::vector<at::Tensor>& x_BHNbD,
                                const std::vector<at::Tensor>& y_BHNbD, std::int64_t diagonal) {
  BlockMixParams params = shared_params(weights, x_BHNbD, diagonal);
  std::transform(y_BHNbD.begin(), y_BHNbD.end(), params.y, block_rows);
  return params;
}

BlockMixParams block_mix_params(const at::Tensor& weights, const std::vector<at::Tensor>& x_BHNbD,
                                const std::vector<at::Tensor>& d_y_BHNbD,
                                const std::vector<at::Tensor>& others_BHNbD,
                                const std::vector<at::Tensor>& d_x_BHNbD,
                                const at::Tensor& d_weights, std::int64_t diagonal) {
  BlockMixParams params = shared_params(weights, x_BHNbD, diagonal);
  std::transform(d_y_BHNbD.begin(), d_y_BHNbD.end(), params.d_y, block_rows);
  std::transform(others_BHNbD.begin(), others_BHNbD.end(), params.others, [](const at::Tensor& x) {
    return x.defined() ? block_rows(x) : BlockRowsParams{};
  });
  std::transform(d_x_BHNbD.begin(), d_x_BHNbD.end(), params.d_x, block_rows);
  params.parts = static_cast<int>(d_weights.size(0));
  params.d_weights = d_weights.mutable_data_ptr<float>();
  return params;
}

at::Tensor new_block_mix_d_weights(const std::vector<at::Tensor>& x_BHNbD) {
  const at::Tensor& x = x_BHNbD[0];
  const int parts = BlockMixShape::num_parts(shape_params(x_BHNbD));
  return at::empty({parts, x.size(0), x.size(1), x.size(2), x.size(2)},
                   x.options().dtype(at::kFloat));
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct MixOnGpu : torch::autograd::Function<MixOnGpu> {
  // Reads the rounded weights; the unrounded ones get the gradient. Returns each y, then each x for
  // its other consumers.
  static variable_list forward(AutogradContext* context, const at::Tensor& /*weights_BHNN*/,
                               const at::Tensor& weights, at::TensorList x_BHNbD,
                               std::int64_t diagonal) {
    const variable_list x = each_of(x_BHNbD, with_aligned_rows);
    variable_list y = each_of(x, new_blocks_like);
    const BlockMixParams params = block_mix_params(weights, x, y, diagonal);
    if constexpr (kHasGpuKernels) launch_block_mix(params, current_stream(x[0]));
    context->saved_data["diagonal"] = diagonal;
    variable_list saved = x;
    saved.push_back(weights);
    return mix_outputs(context, std::move(saved), std::move(y), x_BHNbD);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    variable_list x = context->get_saved_variables();
    const at::Tensor weights = x.back();
    x.pop_back();
    const MixGradients mix(gradients, x, with_aligned_rows);
    const auto& [d_y, others] = mix;
    const variable_list d_x = each_of(x, new_blocks_like);
    const at::Tensor d_weights = new_block_mix_d_weights(x);
    const BlockMixParams params = block_mix_params(weights, x, d_y, others, d_x, d_weights,
                                                   context->saved_data["diagonal"].toInt());
    if constexpr (kHasGpuKernels) launch_block_mix_backward(params, current_stream(x[0]));
    return mix_gradients({d_weights.size(0) == 1 ? d_weights[0] : d_weights.sum(0), at::Tensor()},
                         d_x);
  }
};

}  // namespace

BlockMixes mix_on_gpu(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                      std::int64_t diagonal, const at::Tensor& rounded) {
  const at::Tensor& x = x_BHNbD[0];
  const auto of_heads = [&](const at::Tensor& w) {
    return w.expand({x.size(0), x.size(1), -1, -1});
  };
  const at::Tensor weights =
      rounded.defined() ? rounded : block_mix_weights(weights_BHNN.detach(), x.scalar_type());
  return mixes_of(MixOnGpu::apply(of_heads(weights_BHNN), of_heads(weights),
                                  at::TensorList(x_BHNbD), diagonal));
}

}  // namespace birkhoff
