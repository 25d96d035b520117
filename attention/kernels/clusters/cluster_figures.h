// The counts that routing attention reports about its clusters.
// Legend: B batch, H heads, L rows, M compared rows, K clusters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/clusters/gpu_params.h"
#include "attention/kernels/common/path.h"

namespace birkhoff {

struct ClusterCounts {
  at::Tensor cluster_BHL;  // int32; -1: padding
  at::Tensor before_BHM;   // int32: the clusters of rows 0, compared, 2 compared, .. before
  std::int64_t compared = 1;
  at::Tensor idle_steps_HK;  // in the dtype of sums: steps since each cluster had a row
};

// The counts of ClusterFigure, summed over samples and heads: [kNumClusterFigures], in the dtype of
// idle_steps. Local; on a GPU asynchronous and the same numbers.
at::Tensor count_clusters(const ClusterCounts& counts, Path limit);

// Arguments of the kernel, which writes the counts of each sample's heads, int32 [B H,
// kNumClusterFigures], for tests and cluster_figures.cpp. cluster and before are contiguous; all
// must outlive the launch.
ClusterCountsParams cluster_counts_params(const ClusterCounts& counts, const at::Tensor& of_heads);

}  // namespace birkhoff
