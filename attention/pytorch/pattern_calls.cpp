#include "attention/pytorch/pattern_calls.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/kernels/common/limits.h"
#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "attention/kernels/sparse_patterns/sparse_pattern.h"
#include "attention/pytorch/arguments.h"
#include "attention/pytorch/differentiate.h"

namespace birkhoff::ops {
namespace {

void check(const AttentionInPattern& call, at::TensorList inputs) {
  check_inputs(inputs, /*may_have_weights=*/false);
  check_between("stride", call.stride, 1, kMaxBlockTokens);
  check_between("summary", call.summary, 1, kMaxBlockTokens);
  TORCH_CHECK_VALUE(call.pattern == "fixed" || call.pattern == "strided", "birkhoff: pattern is '",
                    call.pattern, "'; it must be fixed or strided");
  TORCH_CHECK_VALUE(call.part == "merged" || call.part == "second", "birkhoff: part is '",
                    call.part, "'; it must be merged or second");
  check_mask_types(inputs[kQueries], call.key_lengths, call.segments);
}

void check(const AttentionToSharedBlocks& call, at::TensorList inputs) {
  check_inputs(inputs, /*may_have_weights=*/true);
  TORCH_CHECK_VALUE(has(inputs, kWeights), "birkhoff: block weights are missing");
  check_block(call.block);
  TORCH_CHECK_VALUE(
      call.local || !has(inputs, kRelativeKeys),
      "birkhoff: sorted blocks have no relative positions; give them with local=True");
  check_dropout(call.dropout, call.seed, inputs[kQueries]);
  check_integers("key_lengths", call.key_lengths, inputs[kQueries]);
}

// The attention of a checked call, differentiable in the inputs.
at::Tensor attend(const AttentionInPattern& call, at::TensorList inputs) {
  check(call, inputs);
  check_sizes_of_inputs(inputs, call.causal);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys];
  TORCH_CHECK_VALUE(!is_none(k), "birkhoff: k must be [B, H, L, D], not none");
  check_masks(q, call.key_lengths, call.segments);
  const SparsePattern pattern{.strided = call.pattern == "strided",
                              .merged = call.part == "merged",
                              .causal = call.causal,
                              .stride = call.stride,
                              .summary = std::min(call.summary, call.stride)};
  const GivenTerms terms = terms_of(inputs, call.causal);
  const AttentionPart part = attend_in_pattern(
      lists_of_pattern(pattern, q.size(2), q.device()),
      {.q_BHLD = q,
       .k_BHSD = k,
       .v_BHSD = inputs[kValues],
       .rows = {},
       .key_lengths_B = call.key_lengths.value_or(at::Tensor()),
       .relative = terms.relative},
      Documents(call.segments.value_or(at::Tensor()), /*lengths_B=*/{}, q, /*num_documents=*/0),
      Path::kFused);
  return terms.sink_H.defined() ? with_sink(part, terms.sink_H).out_BHLD : part.out_BHLD;
}

at::Tensor attend(const AttentionToSharedBlocks& call, at::TensorList inputs) {
  check(call, inputs);
  check_sizes_of_inputs(inputs, /*causal=*/false, /*square=*/call.local);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys], &weights = inputs[kWeights];
  TORCH_CHECK_VALUE(!is_none(k), "birkhoff: k must be [B, H, S, D], not none");
  check_lengths("key_lengths", call.key_lengths, k);
  const Blocks blocks(k,
                      {.key_lengths_B = call.key_lengths.value_or(at::Tensor()), .segments_BL = {}},
                      std::min(call.block, k.size(2)), /*causal=*/false);
  const std::int64_t N = blocks.num_blocks(), n = weights.size(2);
  TORCH_CHECK_VALUE(n >= 1 && n <= N && weights.size(0) == k.size(0) &&
                        weights.size(1) == k.size(1) && weights.size(3) == N,
                    "birkhoff: block weights must be [", k.size(0), ", ", k.size(1), ", 1 to ", N,
                    ", ", N, "], not ", weights.sizes());
  const at::Tensor open_BNN = open_pairs(blocks);
  BlockAttention attention = shared_blocks_attention(
      blocks,
      {.weights_BHnN =
           open_BNN.defined()
               ? weights.masked_fill(open_BNN.narrow(1, 0, n).logical_not().unsqueeze(1), 0)
               : weights,
       .visible_BNN = open_BNN,
       .own = call.local},
      q, k, inputs[kValues], Path::kFused);
  const GivenTerms terms = terms_of(inputs, /*causal=*/false);
  attention.relative = terms.relative;
  attention.sink_H = terms.sink_H;
  attention.dropout = static_cast<float>(call.dropout);
  attention.noise = noise_of(call.dropout, call.seed, q);
  return attend_in_blocks(attention, Path::kFused).flatten(2, 3).narrow(2, 0, q.size(2));
}

// ---- Both operators.

template <typename Call>
Tensors forward_of(const Call& call, at::TensorList inputs) {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  return {laid_out_as(inputs[kQueries], attend(call, inputs))};
}

template <typename Call>
Tensors backward_of(const Call& call, at::TensorList gradients, at::TensorList inputs) {
  const at::Tensor& q = inputs[kQueries];
  const c10::OptionalDeviceGuard guard(q.device());
  check_given(gradients, {{"d_out", q.scalar_type(), q.sizes().vec()}});
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        return {{attend(call, x)}, {gradients[0]}};
      },
      inputs);
}

template <typename Call>
Tensors meta_of(const Call& call, at::TensorList inputs) {
  check(call, inputs);
  return {at::empty_like(inputs[kQueries])};
}

}  // namespace

Tensors AttentionInPattern::forward(at::TensorList inputs) const {
  return forward_of(*this, inputs);
}

Tensors AttentionInPattern::meta(at::TensorList inputs) const { return meta_of(*this, inputs); }

Tensors AttentionInPattern::backward(at::TensorList gradients, at::TensorList inputs,
                                     at::TensorList /*saved*/) const {
  return backward_of(*this, gradients, inputs);
}

Tensors AttentionToSharedBlocks::forward(at::TensorList inputs) const {
  return forward_of(*this, inputs);
}

Tensors AttentionToSharedBlocks::meta(at::TensorList inputs) const {
  return meta_of(*this, inputs);
}

Tensors AttentionToSharedBlocks::backward(at::TensorList gradients, at::TensorList inputs,
                                          at::TensorList /*saved*/) const {
  return backward_of(*this, gradients, inputs);
}

}  // namespace birkhoff::ops
