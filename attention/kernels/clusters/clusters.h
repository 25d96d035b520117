// Rows as unit vectors in clusters: the steps of online k-means that attention by clusters needs
// (Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing Transformers", section
// 4.1). The score of a row x for a centroid is their product with x / |x|. The kernels store scores
// for a tile of rows (CPU) or, with a window, for 32 clusters (GPU) at a time; the reference stores
// them all.
//
// Legend: B batch, H heads, L rows, D head dim, K clusters, W rows that are chosen for a cluster, N
// documents, G segments, P slots of a list (gathered_attention.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/common/path.h"

namespace birkhoff {

// Rows that may share a cluster.
struct Documents {
  // int32: the index of the row's document, from 0, never decreasing along a sample; -1: padding,
  // which comes last. B may be 1.
  at::Tensor number_BL;
  std::int64_t count = 1;  // N, at least the maximum over samples
  bool has_padding = false;

  // segments_BL: ids that never decrease along a sample (AttentionInput); undefined: one document.
  // Rows at lengths_B and after are padding; undefined: none. num_documents: at least as many as
  // any sample has. With 0 they are counted, which waits for the device if segments are defined (on
  // the meta device, which has no values, count is 1).
  Documents(const at::Tensor& segments_BL, const at::Tensor& lengths_B, const at::Tensor& x_BHLD,
            std::int64_t num_documents);
};

struct ClusterProblem {
  at::Tensor x_BHLD;         // fp32 or another dtype, whose sums are fp32 or wider
  at::Tensor centroids_HKD;  // unit vectors, of the dtype of those sums
  Documents documents;
  double length = 1;        // of the resulting rows
  std::int64_t window = 0;  // W; 0: no rows are chosen
};

struct ClusteredRows {
  // length x / |x|, of x's dtype; 0 for x = 0. Differentiable by x.
  at::Tensor unit_BHLD;
  // The sum over rows, except padding, of |x / |x| - centroid|^2, in the dtype of sums.
  // Differentiable only by x.
  at::Tensor distance_BH;
  // int32: the cluster with the highest score, the first among equal scores. -1: padding.
  at::Tensor cluster_BHL;
  // With a window, int32 lists of N K segments: for each document, for each cluster, the W rows of
  // the document with the highest scores (all, if it has fewer; among equal scores the first), in
  // ascending order. NaN counts as the highest score.
  at::Tensor nearest_BHP, nearest_ends_BHG;
};

// The fastest path up to `limit` that supports x; kSdpa is never it. kFused: on the CPU fp32, fp64
// and bf16, on a GPU fp32, bf16 and fp16, D up to 256.
PathChoice choose_path(const ClusterProblem& problem, Path limit);

// On the CPU the same bits for any number of threads; on a GPU the same bits each time,
// asynchronous on the current stream. Error(kInternal) if shapes or dtypes do not fit.
ClusteredRows cluster_rows(const ClusterProblem& problem, Path limit);

// length x / |x| [.., D], in x's dtype; 0 for x = 0. Differentiable plain operations.
at::Tensor unit_rows(const at::Tensor& x, double length);

// The scores of all rows [B, H, L, K], in the dtype of sums. No gradients.
at::Tensor cluster_scores(const ClusterProblem& problem);

// The sums over the batch of x / |x| in each cluster, then the number of its rows: [H, K, D + 1].
// `rows` are the problem's. No gradients.
at::Tensor cluster_sums(const ClusterProblem& problem, const ClusteredRows& rows, Path limit);

}  // namespace birkhoff
