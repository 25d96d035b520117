// Arguments of the GPU kernels of clusters. See attention/kernels/clusters/gpu_clusters.cu. Legend:
// B batch, H heads, L rows, D head dim, K clusters, N documents, P slots of a list.
#pragma once

#include <cstdint>

#include "attention/kernels/common/gpu_rows.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct ClusterShape {
  static constexpr int kMaxHeadDim = 256;

  KernelDtype dtype;  // of rows: kFloat, kBFloat16 or kHalf
  int batch, heads, rows, head_dim, clusters;
  float length;  // of the rows of `unit`
};

struct ClusterRowsParams {
  static constexpr int kChunk = 32;  // clusters whose scores are in memory at a time

  ClusterShape shape;
  RowsParams x, unit;
  const float* centroids;         // [H, K, D]
  const std::int32_t* documents;  // [B, L], or [1, L] if shared: Documents::number_BL
  bool shared_documents;          // by all samples
  float *inverse, *best_score;    // [B, H, L]; best_score is scratch
  std::int32_t* cluster;          // [B, H, L]
  float* distance;                // [B, H]

  // The nearest rows. All null: none are chosen.
  int num_documents, slots;
  const std::int32_t* document_ends;  // [B, N], or [1, N]: the row after the last
  const std::int32_t* ends;           // [B, H, N K]: of the segments; gives their sizes
  std::int32_t* nearest;              // [B, H, P]
  std::uint32_t* keys;                // scratch [B, H, kChunk, L]
};

// ClusterGradientProblem (cluster_gradients.h).
struct ClusterGradientParams {
  ClusterShape shape;
  RowsParams unit, d_unit, d_x;  // d_unit null: 0
  const float* centroids;        // [H, K, D]
  const float* inverse;          // [B, H, L]
  const std::int32_t* cluster;   // [B, H, L]
  const float* d_distance;       // [B, H]; null: 0
};

struct ClusterSumsParams {
  static constexpr int kColumns = 64;  // of the part of a row that a thread block adds up

  ClusterShape shape;
  RowsParams unit;
  const std::int32_t* cluster;  // [B, H, L]
  float* sums;                  // [B, H, K, D + 1]

  // The parts of a row.
  BIRKHOFF_HOST_DEVICE int parts() const { return (shape.head_dim + kColumns - 1) / kColumns; }
};

enum ClusterFigure {
  kMovedRows,       // compared rows whose cluster has changed
  kComparedRows,    // except padding
  kLargestCluster,  // the rows of the largest cluster, of each head of each sample
  kRows,            // except padding
  kIdleClusters,    // without a row in the last step
  kClusters,        // of all heads
  kNumClusterFigures
};

// ClusterCounts (cluster_figures.h).
struct ClusterCountsParams {
  static constexpr int kMaxClusters = 4096;  // whose counts fit the shared memory of sm_80

  int batch, heads, rows, compared, clusters;
  const std::int32_t *cluster, *before;  // [B, H, L] and [B, H, M]
  const float* idle_steps;               // [H, K]
  std::int64_t idle_strides[2];
  std::int32_t* counts;  // [B, H, kNumClusterFigures]
};

// ClusterDraw (cluster_seeds.h).
struct ClusterSeedsParams {
  ClusterShape shape;
  RowsParams unit;
  const std::int32_t* documents;  // as in ClusterRowsParams
  bool shared_documents;
  std::uint64_t seed;
  const std::int64_t* step;
  std::uint32_t layer, purpose;
  const std::int64_t* sample_ids;  // [B]
  std::int64_t global_batch, first_head;
  float* seeds;  // [H, K, D]
};

// Asynchronous on `stream`.
void launch_cluster_seeds(const ClusterSeedsParams& params, CUstream_st* stream);
void launch_cluster_counts(const ClusterCountsParams& params, CUstream_st* stream);
void launch_cluster_rows(const ClusterRowsParams& params, CUstream_st* stream);
void launch_cluster_gradients(const ClusterGradientParams& params, CUstream_st* stream);
void launch_cluster_sums(const ClusterSumsParams& params, CUstream_st* stream);

}  // namespace birkhoff
