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
#include <tuple>
#include <vector>

namespace birkhoff::ops {

// Routing attention (attention/kernels/clusters/cluster_attention.h). Without keys, queries are
// keys. centroids [H, K, D]: unit vectors, float32 or, with fp64 queries, float64. `selection` is
// "causal_bucket", "full_topw" (causal: leaks) or "encoder"; `overlap` is "mean" or "softmax".
// Logits are logit_scale times the cosine; 0: sqrt(D).
//
// Returns the output; the distance [B, H], the sum over tokens of |x / |x| - centroid|^2, of
// queries and keys; and sums [H, K, D + 1] of unit vectors in each cluster and their counts, which
// have no gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_in_clusters(
    at::TensorList inputs, const at::Tensor& centroids, std::int64_t window,
    std::string_view selection, std::string_view overlap, double logit_scale,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& segments);
std::vector<at::Tensor> attention_in_clusters_backward(
    const at::Tensor& d_out, const at::Tensor& d_distance, at::TensorList inputs,
    const at::Tensor& centroids, std::int64_t window, std::string_view selection,
    std::string_view overlap, double logit_scale, const std::optional<at::Tensor>& key_lengths,
    const std::optional<at::Tensor>& segments);

// Attention of each query to its own block and to the blocks chosen [B, H, L, C], int64, -1 for
// none; if causal, up to the query itself. A block that is listed twice counts twice.
at::Tensor attention_to_listed_blocks(at::TensorList inputs, const at::Tensor& chosen,
                                      std::int64_t block, bool causal,
                                      const std::optional<at::Tensor>& key_lengths,
                                      const std::optional<at::Tensor>& segments);
std::vector<at::Tensor> attention_to_listed_blocks_backward(
    const at::Tensor& d_out, at::TensorList inputs, const at::Tensor& chosen, std::int64_t block,
    bool causal, const std::optional<at::Tensor>& key_lengths,
    const std::optional<at::Tensor>& segments);

// int64 [B, H, L, count]: select_top_blocks() of block_top_k.h, -1 where there are no more.
at::Tensor chosen_blocks(const at::Tensor& q, const at::Tensor& k, std::int64_t block,
                         std::int64_t count, bool causal,
                         const std::optional<at::Tensor>& key_lengths,
                         const std::optional<at::Tensor>& segments);

// Checks that need no memory.
void check_clusters(at::TensorList inputs, const at::Tensor& centroids, std::int64_t window,
                    std::string_view selection, std::string_view overlap, double logit_scale,
                    const std::optional<at::Tensor>& key_lengths,
                    const std::optional<at::Tensor>& segments);
void check_listed_blocks(at::TensorList inputs, const at::Tensor& chosen, std::int64_t block,
                         const std::optional<at::Tensor>& key_lengths,
                         const std::optional<at::Tensor>& segments);
void check_choice(const at::Tensor& q, const at::Tensor& k, std::int64_t block, std::int64_t count,
                  const std::optional<at::Tensor>& key_lengths,
                  const std::optional<at::Tensor>& segments);

}  // namespace birkhoff::ops
