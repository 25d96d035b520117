// The rows that may become centroids of clusters without rows (attention/mechanisms/routing/
// centroids.h). Legend: H heads, K clusters, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/clusters/clusters.h"
#include "attention/kernels/clusters/gpu_params.h"
#include "attention/kernels/common/path.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

// A row of the global batch for each cluster, which the noise of (step, layer, head, cluster)
// chooses. `rows` are the problem's.
struct ClusterDraw {
  const ClusterProblem& problem;
  const ClusteredRows& rows;
  const NoiseKey& noise;               // its global_batch is above 0
  std::int64_t first_head, all_heads;  // of these heads; on all ranks of the tensor axis
};

// The unit vectors of these rows [H, K, D], zeros for rows that another rank has, in the dtype of
// the centroids. Asynchronous on a GPU. No gradients.
at::Tensor draw_rows(const ClusterDraw& draw, Path limit);

// Arguments of the kernel, for tests and cluster_seeds.cpp. documents and sample ids are
// contiguous; all must outlive the launch.
ClusterSeedsParams cluster_seeds_params(const ClusterDraw& draw, const at::Tensor& seeds_HKD);

}  // namespace birkhoff
