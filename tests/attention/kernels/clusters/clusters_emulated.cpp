// The GPU kernels of clusters and of the choice of blocks, run on the CPU by tests/emulated_cuda.
#include "tests/attention/kernels/clusters/clusters_emulated.h"

#define launch_cluster_rows emulate_launch_cluster_rows
#define launch_cluster_gradients emulate_launch_cluster_gradients
#define launch_cluster_sums emulate_launch_cluster_sums
#define launch_cluster_seeds emulate_launch_cluster_seeds
#define launch_cluster_counts emulate_launch_cluster_counts
#define launch_block_choice emulate_launch_block_choice
#include "attention/kernels/block_top_k/gpu_top_k.cu"
#include "attention/kernels/clusters/gpu_clusters.cu"
#include "attention/kernels/clusters/gpu_figures.cu"

namespace birkhoff {

float4 score_memory[232448 / sizeof(float4)];
int figure_memory[232448 / sizeof(int)];

void emulate_cluster_rows(const ClusterRowsParams& params) {
  emulate_launch_cluster_rows(params, nullptr);
}
void emulate_cluster_gradients(const ClusterGradientParams& params) {
  emulate_launch_cluster_gradients(params, nullptr);
}
void emulate_cluster_sums(const ClusterSumsParams& params) {
  emulate_launch_cluster_sums(params, nullptr);
}
void emulate_cluster_seeds(const ClusterSeedsParams& params) {
  emulate_launch_cluster_seeds(params, nullptr);
}
void emulate_cluster_counts(const ClusterCountsParams& params) {
  emulate_launch_cluster_counts(params, nullptr);
}
void emulate_block_choice(const BlockTopKParams& params) {
  emulate_launch_block_choice(params, nullptr);
}

}  // namespace birkhoff
