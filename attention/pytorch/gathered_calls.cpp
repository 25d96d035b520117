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

using OptionalTensor = std::optional<at::Tensor>;

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
  return {segments.value_or(at::Tensor()), key_lengths.value_or(at::Tensor()), q};
}

// A checked call of attention_in_clusters, differentiable in `inputs`.
ClusterAttention clusters_of(at::TensorList inputs, const at::Tensor& centroids,
                             std::int64_t window, std::string_view selection,
                             std::string_view overlap, double logit_scale,
                             const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_clusters(inputs, centroids, window, selection, overlap, logit_scale, key_lengths, segments);
  const ClusterSelection chosen = selection_named(selection);
  const bool causal = chosen != ClusterSelection::kNearest;
  check_sizes_of_inputs(inputs, causal);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys], &v = inputs[kValues];
  TORCH_CHECK_VALUE(!is_none(k) || v.size(1) == q.size(1), "birkhoff: without k, v must have q's ",
                    q.size(1), " heads, not ", v.size(1));
  TORCH_CHECK_VALUE(
      centroids.size(0) == v.size(1) && centroids.size(1) > 0 && centroids.size(2) == q.size(3),
      "birkhoff: centroids must be [", v.size(1), ", K, ", q.size(3), "], K above 0, not ",
      centroids.sizes());
  const GivenTerms terms = terms_of(inputs, causal);
  return {.q_BHLD = q,
          .k_BHLD = is_none(k) ? at::Tensor() : k,
          .v_BHLD = v,
          .centroids_HKD = centroids.detach().contiguous(),
          .documents = documents_of(q, key_lengths, segments),
          .length = length_for(logit_scale, q.size(3)),
          .selection = chosen,
          .window = std::min(window, q.size(2)),
          .merge = merge_named(overlap),
          .relative = terms.relative,
          .sink_H = terms.sink_H};
}

// A checked call of attention_to_listed_blocks, differentiable in `inputs`.
GatheredAttention listed(at::TensorList inputs, const at::Tensor& chosen, std::int64_t block,
                         bool causal, const OptionalTensor& key_lengths,
                         const OptionalTensor& segments) {
  check_listed_blocks(inputs, chosen, block, key_lengths, segments);
  check_sizes_of_inputs(inputs, causal);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys];
  TORCH_CHECK_VALUE(!is_none(k), "birkhoff: k must be [B, H, L, D], not none");
  TORCH_CHECK_VALUE(
      chosen.size(0) == k.size(0) && chosen.size(1) == k.size(1) && chosen.size(2) == k.size(2),
      "birkhoff: chosen must be [", k.size(0), ", ", k.size(1), ", ", k.size(2), ", C], not ",
      chosen.sizes());
  const std::int64_t of_block = std::min(block, q.size(2)),
                     N = (q.size(2) + of_block - 1) / of_block;
  if (chosen.is_cpu() && chosen.numel() > 0) {
    const auto [least, most] = chosen.aminmax();
    for (const at::Tensor& number : {least, most}) {
      check_between("chosen", number.item<std::int64_t>(), -1, N - 1);
    }
  }
  const BlockTopK choice{.q_BHLD = k.detach(),
                         .k_BHLD = k.detach(),
                         .documents = documents_of(q, key_lengths, segments),
                         .block = of_block,
                         .others = chosen.size(3),
                         .causal = causal};
  // lists_of_blocks() tells documents apart by their positions.
  TORCH_CHECK_VALUE(choice.documents.count * q.size(2) < (std::int64_t{1} << 31),
                    "birkhoff: ", choice.documents.count, " segments in ", q.size(2),
                    " tokens; their product must be below 2^31");
  const GivenTerms terms = terms_of(inputs, causal);
  return {.q_BHLD = q,
          .k_BHSD = k,
          .v_BHSD = inputs[kValues],
          .rows = lists_of_blocks(choice, chosen),
          .key_lengths_B = key_lengths.value_or(at::Tensor()),
          .relative = terms.relative,
          .sink_H = terms.sink_H};
}

}  // namespace

void check_clusters(at::TensorList inputs, const at::Tensor& centroids, std::int64_t window,
                    std::string_view selection, std::string_view overlap, double logit_scale,
                    const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_inputs(inputs, /*may_have_weights=*/false);
  const at::Tensor& q = inputs[kQueries];
  TORCH_CHECK_VALUE(centroids.dim() == 3, "birkhoff: centroids must be [H, K, D], not ",
                    centroids.sym_sizes());
  check_dtype("centroids", centroids, at::toOpMathType(q.scalar_type()));
  check_device("centroids", centroids, q);
  check_between("window", window, 1, kMaxBlockTokens);
  selection_named(selection);
  merge_named(overlap);
  TORCH_CHECK_VALUE(logit_scale >= 0 && std::isfinite(logit_scale),
                    "birkhoff: logit_scale must be 0 (the square root of D) or above, not ",
                    logit_scale);
  check_mask_types(q, key_lengths, segments);
}

void check_listed_blocks(at::TensorList inputs, const at::Tensor& chosen, std::int64_t block,
                         const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_inputs(inputs, /*may_have_weights=*/false);
  TORCH_CHECK_VALUE(chosen.dim() == 4, "birkhoff: chosen must be [B, H, L, C], not ",
                    chosen.sym_sizes());
  check_dtype("chosen", chosen, at::kLong);
  check_device("chosen", chosen, inputs[kQueries]);
  check_block(block);
  check_mask_types(inputs[kQueries], key_lengths, segments);
}

void check_choice(const at::Tensor& q, const at::Tensor& k, std::int64_t block, std::int64_t count,
                  const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  const at::Tensor none = at::empty({0}, q.options());
  check_inputs({q, k, k, none, none, none}, /*may_have_weights=*/false);
  check_block(block);
  check_between("count", count, 0, kMaxBlockTokens);
  check_mask_types(q, key_lengths, segments);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_in_clusters(
    at::TensorList inputs, const at::Tensor& centroids, std::int64_t window,
    std::string_view selection, std::string_view overlap, double logit_scale,
    const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  const ClusterAttention in = clusters_of(inputs, centroids, window, selection, overlap,
                                          logit_scale, key_lengths, segments);
  const ClusteredTokens tokens = cluster_tokens(in, Path::kFused);
  return {laid_out_as(in.q_BHLD, attend_in_clusters(in, tokens, Path::kFused)),
          tokens.distance_BH().contiguous(), tokens.sums(Path::kFused).contiguous()};
}

std::vector<at::Tensor> attention_in_clusters_backward(
    const at::Tensor& d_out, const at::Tensor& d_distance, at::TensorList inputs,
    const at::Tensor& centroids, std::int64_t window, std::string_view selection,
    std::string_view overlap, double logit_scale, const OptionalTensor& key_lengths,
    const OptionalTensor& segments) {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  const at::Tensor &q = inputs[kQueries], &v = inputs[kValues];
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        const ClusterAttention in = clusters_of(x, centroids, window, selection, overlap,
                                                logit_scale, key_lengths, segments);
        check_saved("d_out", d_out, q.scalar_type(), q.sizes());
        check_saved("d_distance", d_distance, at::toOpMathType(q.scalar_type()),
                    {q.size(0), v.size(1)});
        const ClusteredTokens tokens = cluster_tokens(in, Path::kFused);
        return {{attend_in_clusters(in, tokens, Path::kFused), tokens.distance_BH()},
                {d_out, d_distance}};
      },
      inputs);
}

at::Tensor attention_to_listed_blocks(at::TensorList inputs, const at::Tensor& chosen,
                                      std::int64_t block, bool causal,
                                      const OptionalTensor& key_lengths,
                                      const OptionalTensor& segments) {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  const GatheredAttention in = listed(inputs, chosen, block, causal, key_lengths, segments);
  return laid_out_as(in.q_BHLD, attend_gathered(in, Path::kFused).out_BHLD);
}

std::vector<at::Tensor> attention_to_listed_blocks_backward(
    const at::Tensor& d_out, at::TensorList inputs, const at::Tensor& chosen, std::int64_t block,
    bool causal, const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  const c10::OptionalDeviceGuard guard(inputs[kQueries].device());
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        const GatheredAttention in = listed(x, chosen, block, causal, key_lengths, segments);
        check_saved("d_out", d_out, in.q_BHLD.scalar_type(), in.q_BHLD.sizes());
        return {{attend_gathered(in, Path::kFused).out_BHLD}, {d_out}};
      },
      inputs);
}

at::Tensor chosen_blocks(const at::Tensor& q, const at::Tensor& k, std::int64_t block,
                         std::int64_t count, bool causal, const OptionalTensor& key_lengths,
                         const OptionalTensor& segments) {
  const c10::OptionalDeviceGuard guard(q.device());
  check_choice(q, k, block, count, key_lengths, segments);
  const at::Tensor none = at::empty({0}, q.options());
  check_sizes_of_inputs({q, k, k, none, none, none}, causal);
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
