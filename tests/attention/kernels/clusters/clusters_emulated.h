// The GPU kernels of clusters and of the choice of blocks, run on the CPU by tests/emulated_cuda.
#pragma once

#include "attention/kernels/block_top_k/gpu_params.h"
#include "attention/kernels/clusters/gpu_params.h"

namespace birkhoff {

void emulate_cluster_rows(const ClusterRowsParams& params);
void emulate_cluster_gradients(const ClusterGradientParams& params);
void emulate_cluster_sums(const ClusterSumsParams& params);
void emulate_cluster_seeds(const ClusterSeedsParams& params);
void emulate_cluster_counts(const ClusterCountsParams& params);
void emulate_block_choice(const BlockTopKParams& params);

}  // namespace birkhoff
