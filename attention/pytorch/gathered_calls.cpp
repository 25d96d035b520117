#include "attention/pytorch/gathered_calls.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>

#include "attention/kernels/block_top_k/block_top_k.h"
#include "attention/kernels/clusters/cluster_attention.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/limits.h"
#include "attention/pytorch/arguments.h"
#include "attention/pytorch/calls.h"
#include "attention/pytorch/differentiate.h"

namespace birkhoff::ops {
namespace {

ClusterSelection selection_named(std::string_view name) {
  if (name == "causal_bucket") return ClusterSelection::kCausalBucket;
  if (name == "full_topw") return ClusterSelection::kNearestCausal;
  TORCH_CHECK_VALUE(name == "encoder", "birkhoff: selection is '", name,
                    "'; it must be causal_bucket, full_topw or encoder");
  return ClusterSelection::kNearest;
}

SlotMerge merge_named(std::string_view name) {
  if (name == "mean") return SlotMerge::kMean;
  TORCH_CHECK_VALUE(name == "softmax", "birkhoff: overlap is '", name,
                    "'; it must be mean or softmax");
  return SlotMerge::kOneSoftmax;
}

Documents documents_of(const at::Tensor& q, const OptionalTensor& key_lengths,
                       const OptionalTensor& segments) {
  check_masks(q, key_lengths, segments);
  return {segments.value_or(at::Tensor()), key_lengths.value_or(at::Tensor()), q,
          /*num_documents=*/0};
}

void check(const AttentionInClusters& call, at::TensorList inputs) {
  check_inputs(inputs, /*may_have_weights=*/false);
  const at::Tensor& q = inputs[kQueries];
  TORCH_CHECK_VALUE(call.centroids.dim() == 3, "birkhoff: centroids must be [H, K, D], not ",
                    call.centroids.sym_sizes());
  check_dtype("centroids", call.centroids, at::toOpMathType(q.scalar_type()));
  check_device("centroids", call.centroids, q);
  check_between("window", call.window, 1, kMaxBlockTokens);
  selection_named(call.selection);
  merge_named(call.overlap);
  TORCH_CHECK_VALUE(call.logit_scale >= 0 && std::isfinite(call.logit_scale),
                    "birkhoff: logit_scale must be 0 (the square root of D) or above, not ",
                    call.logit_scale);
  check_mask_types(q, call.key_lengths, call.segments);
}

void check(const AttentionToListedBlocks& call, at::TensorList inputs) {
  check_inputs(inputs, /*may_have_weights=*/false);
  TORCH_CHECK_VALUE(call.chosen.dim() == 4, "birkhoff: chosen must be [B, H, L, C], not ",
                    call.chosen.sym_sizes());
  check_dtype("chosen", call.chosen, at::kLong);
  check_device("chosen", call.chosen, inputs[kQueries]);
  check_block(call.block);
  check_mask_types(inputs[kQueries], call.key_lengths, call.segments);
}

// A checked call, differentiable in the inputs.
ClusterAttention clusters_of(const AttentionInClusters& call, at::TensorList inputs) {
  check(call, inputs);
  const ClusterSelection chosen = selection_named(call.selection);
  const bool causal = chosen != ClusterSelection::kNearest;
  check_sizes_of_inputs(inputs, causal);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys], &v = inputs[kValues];
  TORCH_CHECK_VALUE(!is_none(k) || v.size(1) == q.size(1), "birkhoff: without k, v must have q's ",
                    q.size(1), " heads, not ", v.size(1));
  TORCH_CHECK_VALUE(call.centroids.size(0) == v.size(1) && call.centroids.size(1) > 0 &&
                        call.centroids.size(2) == q.size(3),
                    "birkhoff: centroids must be [", v.size(1), ", K, ", q.size(3),
                    "], K above 0, not ", call.centroids.sizes());
  const GivenTerms terms = terms_of(inputs, causal);
  return {.q_BHLD = q,
          .k_BHLD = is_none(k) ? at::Tensor() : k,
          .v_BHLD = v,
          .centroids_HKD = call.centroids.detach().contiguous(),
          .documents = documents_of(q, call.key_lengths, call.segments),
          .length = length_for(call.logit_scale, q.size(3)),
          .selection = chosen,
          .window = std::min(call.window, q.size(2)),
          .merge = merge_named(call.overlap),
          .relative = terms.relative,
          .sink_H = terms.sink_H};
}

// A checked call, differentiable in the inputs.
GatheredAttention listed(const AttentionToListedBlocks& call, at::TensorList inputs) {
  check(call, inputs);
  check_sizes_of_inputs(inputs, call.causal);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys];
  TORCH_CHECK_VALUE(!is_none(k), "birkhoff: k must be [B, H, L, D], not none");
  TORCH_CHECK_VALUE(call.chosen.size(0) == k.size(0) && call.chosen.size(1) == k.size(1) &&
                        call.chosen.size(2) == k.size(2),
                    "birkhoff: chosen must be [", k.size(0), ", ", k.size(1), ", ", k.size(2),
                    ", C], not ", call.chosen.sizes());
  const std::int64_t of_block = std::min(call.block, q.size(2)),
                     N = (q.size(2) + of_block - 1) / of_block;
  if (call.chosen.is_cpu() && call.chosen.numel() > 0) {
    const auto [least, most] = call.chosen.aminmax();
    for (const at::Tensor& number : {least, most}) {
      check_between("chosen", number.item<std::int64_t>(), -1, N - 1);
    }
  }
  const BlockTopK choice{.q_BHLD = k.detach(),
                         .k_BHLD = k.detach(),
                         .documents = documents_of(q, call.key_lengths, call.segments),
                         .block = of_block,
                         .others = call.chosen.size(3),
                         .causal = call.causal};
  // lists_of_blocks() tells documents apart by their positions.
  TORCH_CHECK_VALUE(choice.documents.count * q.size(2) < (std::int64_t{1} << 31),
                    "birkhoff: ", choice.documents.count, " segments in ", q.size(2),
                    " tokens; their product must be below 2^31");
  const GivenTerms terms = terms_of(inputs, call.causal);
  return {.q_BHLD = q,
          .k_BHSD = k,
          .v_BHSD = inputs[kValues],
          .rows = lists_of_blocks(choice, call.chosen),
          .key_lengths_B = call.key_lengths.value_or(at::Tensor()),
          .relative = terms.relative,
          .sink_H = terms.sink_H};
}

}  // namespace

void check_choice(const at::Tensor& q, const at::Tensor& k, std::int64_t block, std::int64_t count,
                  const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_inputs({q, k, k}, /*may_have_weights=*/false);
  check_block(block);
  check_between("count", count, 0, kMaxBlockTokens);
  check_mask_types(q, key_lengths, segments);
}

Tensors AttentionInClusters::forward(at::TensorList inputs) const {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  const ClusterAttention in = clusters_of(*this, inputs);
  const ClusteredTokens tokens = cluster_tokens(in, Path::kFused);
  return {laid_out_as(in.q_BHLD, attend_in_clusters(in, tokens, Path::kFused)),
          tokens.distance_BH().contiguous(), tokens.sums(Path::kFused).contiguous()};
}

Tensors AttentionInClusters::meta(at::TensorList inputs) const {
  check(*this, inputs);
  const at::Tensor &q = inputs[kQueries], &v = inputs[kValues];
  return {at::empty_like(q), at::empty_symint({q.sym_size(0), v.sym_size(1)}, centroids.options()),
          at::empty_symint({v.sym_size(1), centroids.sym_size(1), q.sym_size(3) + 1},
                           centroids.options())};
}

Tensors AttentionInClusters::backward(at::TensorList gradients, at::TensorList inputs,
                                      at::TensorList /*saved*/) const {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        const ClusterAttention in = clusters_of(*this, x);
        const at::Tensor& q = in.q_BHLD;
        check_given(
            gradients,
            {{"d_out", q.scalar_type(), q.sizes().vec()},
             {"d_distance", at::toOpMathType(q.scalar_type()), {q.size(0), in.v_BHLD.size(1)}}});
        const ClusteredTokens tokens = cluster_tokens(in, Path::kFused);
        return {{attend_in_clusters(in, tokens, Path::kFused), tokens.distance_BH()},
                gradients.vec()};
      },
      inputs);
}

Tensors AttentionToListedBlocks::forward(at::TensorList inputs) const {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  const GatheredAttention in = listed(*this, inputs);
  return {laid_out_as(in.q_BHLD, attend_gathered(in, Path::kFused).out_BHLD)};
}

Tensors AttentionToListedBlocks::meta(at::TensorList inputs) const {
  check(*this, inputs);
  return {at::empty_like(inputs[kQueries])};
}

Tensors AttentionToListedBlocks::backward(at::TensorList gradients, at::TensorList inputs,
                                          at::TensorList /*saved*/) const {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        const GatheredAttention in = listed(*this, x);
        check_given(gradients, {{"d_out", in.q_BHLD.scalar_type(), in.q_BHLD.sizes().vec()}});
        return {{attend_gathered(in, Path::kFused).out_BHLD}, {gradients[0]}};
      },
      inputs);
}

at::Tensor chosen_blocks(const at::Tensor& q, const at::Tensor& k, std::int64_t block,
                         std::int64_t count, bool causal, const OptionalTensor& key_lengths,
                         const OptionalTensor& segments) {
  const c10::OptionalDeviceGuard guard(q.device());
  check_choice(q, k, block, count, key_lengths, segments);
  check_sizes_of_inputs({q, k, k}, causal);
  const BlockTopK choice{.q_BHLD = group_means(q, k.size(1)),
                         .k_BHLD = k,
                         .documents = documents_of(q, key_lengths, segments),
                         .block = std::min(block, q.size(2)),
                         .others = count,
                         .causal = causal};
  const at::Tensor chosen_BHLC = select_top_blocks(choice, Path::kFused).to(at::kLong);
  return at::constant_pad_nd(chosen_BHLC, {0, count - chosen_BHLC.size(3)}, -1).contiguous();
}

}  // namespace birkhoff::ops
