#include "attention/kernels/block_attention/gpu_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention/kernels/common/dropout_arguments.h"
#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMinBlock = 16;

// The kernels move 16-bit words, and write only to results.
std::uint16_t* words_of(const at::Tensor& x) {
  return static_cast<std::uint16_t*>(const_cast<void*>(x.const_data_ptr()));
}

float* floats_of(const at::Tensor& x) {
  require(x.is_contiguous(), "block attention: statistics must be contiguous");
  return x.mutable_data_ptr<float>();
}

BlockDropoutParams gpu_dropout_of(const BlockOperands& operands) {
  const at::Tensor& q = operands.q_BHNbD;
  const NoiseColumns& columns = operands.columns;
  const std::int64_t first_head = operands.noise ? operands.noise->first_head : 0;
  return {dropout_params(operands.dropout, operands.noise, q),
          columns.first + first_head * q.size(2) * q.size(3) * columns.all, columns.all};
}

}  // namespace

std::string why_not_gpu_kernels(const BlockAttention& in) {
  const at::Tensor& q = in.q_BHNbD;
  const at::ScalarType dtype = q.scalar_type();
  const std::int64_t head_dim = q.size(4);
  const auto num_in_place = std::count_if(in.keys.begin(), in.keys.end(),
                                          [](const KeyBlocks& keys) { return keys.in_place; });
  if (in.relative.defined() && in.one_softmax && num_in_place > 1) {
    return "relative positions apply to several sources of keys";
  }
  if (std::string why = why_not_dtype(dtype, {at::kBFloat16, at::kHalf}); !why.empty()) return why;
  if (std::string why = why_not_head_dim(head_dim, BlockAttentionParams::kMaxHeadDim);
      !why.empty()) {
    return why;
  }
  if (q.size(3) < kMinBlock) {
    return fmt::format("a block has {}, fewer than {}", counted(q.size(3), "token"), kMinBlock);
  }
  if (in.keys.size() > BlockAttentionParams::kMaxSources) {
    return fmt::format("there are {} sources of keys, more than {}", in.keys.size(),
                       BlockAttentionParams::kMaxSources);
  }
  if (in.sink_H.defined() && in.sink_H.scalar_type() != dtype) return "sinks have another dtype";
  std::int64_t num_masks = 0;
  for (const KeyBlocks& keys : in.keys) {
    num_masks += keys.window.num_offsets();
    const at::Tensor& bias = keys.bias_BHNbb;
    if (keys.chosen_BHN.defined()) return "blocks of keys are chosen one by one";
    if (keys.k_BHNbD.scalar_type() != dtype || keys.v_BHNbD.scalar_type() != dtype) {
      return "keys have another dtype than queries";
    }
    if (bias.defined() && !(keys.window.is_own_block() && bias.scalar_type() == dtype &&
                            bias.dim() == 5 && bias.size(3) == 1)) {
      return "a bias differs between the queries of a block";
    }
  }
  if (num_masks > BlockAttentionParams::kMaxMasks) {
    return fmt::format("a query sees {} blocks of keys, more than {}", num_masks,
                       BlockAttentionParams::kMaxMasks);
  }
  // Bounds the number of tasks and the number of rows.
  const std::int64_t rows = q.numel() / head_dim * static_cast<std::int64_t>(in.keys.size());
  return rows <= std::numeric_limits<std::int32_t>::max() ? "" : kTooManyRows;
}

BlockRowsParams block_rows(const at::Tensor& x_BHNbD) {
  require(has_aligned_rows(x_BHNbD), "block attention: rows must be aligned to 16 bytes");
  return {.data = words_of(x_BHNbD),
          .strides = {x_BHNbD.stride(0), x_BHNbD.stride(1), x_BHNbD.stride(2), x_BHNbD.stride(3)}};
}

BlockAttentionParams block_attention_params(const BlockOperands& operands,
                                            const BlockResults& results,
                                            const DistanceTerms& terms) {
  const at::Tensor& q = operands.q_BHNbD;
  const auto size = [&](std::int64_t dim) { return static_cast<int>(q.size(dim)); };
  BlockAttentionParams params{};
  params.dtype = q.scalar_type() == at::kHalf ? KernelDtype::kHalf : KernelDtype::kBFloat16;
  params.batch = size(0);
  params.heads = size(1);
  const std::int64_t key_heads = operands.keys[0].k_BHNbD.size(1);
  params.group = static_cast<int>(size(1) / key_heads);
  params.blocks = size(2);
  params.block = size(3);
  params.head_dim = size(4);
  params.scale = static_cast<float>(operands.scale());
  params.q = block_rows(q);
  params.out = block_rows(results.out_BHNbD);
  params.max = floats_of(results.softmax_2BHNb[0]);
  params.inverse_sum = floats_of(results.softmax_2BHNb[1]);
  if (operands.sink_H.defined()) {
    params.sinks = {.data = words_of(operands.sink_H), .stride = operands.sink_H.stride(0)};
  }
  params.distances = terms.params();
  params.dropout = gpu_dropout_of(operands);
  params.num_sources = static_cast<int>(operands.keys.size());
  for (std::size_t s = 0, m = 0; s < operands.keys.size(); ++s) {
    const KeyBlocks& keys = operands.keys[s];
    KeySourceParams& source = params.sources[s];
    source.window = keys.window;
    source.first_mask = static_cast<int>(m);
    source.in_place = keys.in_place;
    source.k = block_rows(keys.k_BHNbD);
    source.v = block_rows(keys.v_BHNbD);
    if (keys.bias_BHNbb.defined()) {
      const at::Tensor bias = keys.bias_BHNbb.expand({size(0), key_heads, size(2), 1, size(3)});
      source.bias.data = words_of(bias);
      const std::int64_t dims[] = {0, 1, 2, 4};
      std::transform(dims, dims + 4, source.bias.strides,
                     [&](std::int64_t dim) { return bias.stride(dim); });
    }
    for (const at::Tensor& mask_BHNbb : keys.mask_BHNbb) {
      BlockMaskParams& mask = params.masks[m++];
      if (!mask_BHNbb.defined()) continue;
      mask.data = mask_BHNbb.const_data_ptr<bool>();
      std::copy_n(mask_BHNbb.strides().begin(), 5, mask.strides);
    }
  }
  return params;
}

BlockAttentionParams block_attention_params(
    const BlockOperands& operands, const BlockResults& results, const at::Tensor& d_out_BHNbD,
    const at::Tensor& delta_BHNb, const DistanceTerms& terms, const BlockGradients& gradients) {
  BlockAttentionParams params = block_attention_params(operands, results, terms);
  params.d_out = block_rows(d_out_BHNbD);
  params.d_q = block_rows(gradients.d_q_BHNbD);
  params.delta = floats_of(delta_BHNb);
  for (std::size_t s = 0; s < gradients.keys.size(); ++s) {
    KeySourceParams& source = params.sources[s];
    source.d_k = block_rows(gradients.keys[s].d_k_BHNbD);
    source.d_v = block_rows(gradients.keys[s].d_v_BHNbD);
    if (source.bias.data) source.bias.gradient = floats_of(gradients.keys[s].d_bias);
  }
  return params;
}

}  // namespace birkhoff
