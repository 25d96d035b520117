// The computations of the operators of attention over gathered rows, as in calls.h: routing, and
// blocks that each query chooses. Their backward passes run the forward pass again.
//
// Legend: calls.h; K clusters, C blocks that a query chooses. Clusters and choices belong to the
// heads of keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

// Routing attention (attention/kernels/clusters/cluster_attention.h). Without keys, queries are
// keys. centroids [H, K, D]: unit vectors, float32 or, with fp64 queries, float64. `selection` is
// "causal_bucket", "full_topw" (causal: leaks) or "encoder"; `overlap` is "mean" or "softmax".
// Logits are logit_scale times the cosine; 0: sqrt(D).
//
// Returns the output; the distance [B, H], the sum over tokens of |x / |x| - centroid|^2, of
// queries and keys; and sums [H, K, D + 1] of unit vectors in each cluster and their counts, which
// have no gradient.
struct AttentionInClusters {
  static constexpr char kName[] = "_attention_in_clusters";
  static constexpr char kOptions[] =
      "Tensor centroids, int window, str selection, str overlap, float logit_scale, "
      "Tensor? key_lengths, Tensor? segments";
  static constexpr std::size_t kOutputs = 2, kFirstSaved = 3;

  at::Tensor centroids;
  std::int64_t window;
  std::string_view selection, overlap;
  double logit_scale;
  OptionalTensor key_lengths, segments;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

// Attention of each query to its own block and to the blocks chosen [B, H, L, C], int64, -1 for
// none; if causal, up to the query itself. A block that is listed twice counts twice.
struct AttentionToListedBlocks {
  static constexpr char kName[] = "_attention_to_listed_blocks";
  static constexpr char kOptions[] =
      "Tensor chosen, int block, bool causal, Tensor? key_lengths, Tensor? segments";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 1;

  at::Tensor chosen;
  std::int64_t block;
  bool causal;
  OptionalTensor key_lengths, segments;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

// int64 [B, H, L, count]: select_top_blocks() of block_top_k.h, -1 where there are no more.
at::Tensor chosen_blocks(const at::Tensor& q, const at::Tensor& k, std::int64_t block,
                         std::int64_t count, bool causal, const OptionalTensor& key_lengths,
                         const OptionalTensor& segments);

// Checks that need no memory.
void check_choice(const at::Tensor& q, const at::Tensor& k, std::int64_t block, std::int64_t count,
                  const OptionalTensor& key_lengths, const OptionalTensor& segments);

}  // namespace birkhoff::ops
