// Counts of rows and clusters for metrics (cluster_figures.h). A block of 256 threads owns a head
// of a sample. Each of its warps counts the rows of each cluster in every eighth run of 32 rows, in
// shared memory: of the lanes whose rows are in one cluster, the first adds their number. Then each
// thread adds up clusters and compared rows, and the threads are added up. Integers, no atomics.
#include "attention/kernels/clusters/gpu_params.h"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {

extern __shared__ int figure_memory[];

namespace {

constexpr int kFigureThreads = 256, kFigureWarps = kFigureThreads / kWarp;

__global__ void __launch_bounds__(kFigureThreads) counts_kernel(const ClusterCountsParams p) {
  const int thread = static_cast<int>(threadIdx.x), warp = warp_number(), lane = lane_number(),
            entry = static_cast<int>(blockIdx.x), head = entry % p.heads, sample = entry / p.heads;
  int* const rows = figure_memory;                       // [kFigureWarps, K]
  int* const totals = rows + kFigureWarps * p.clusters;  // [kFigureWarps, kNumClusterFigures]
  for (int e = thread; e < kFigureWarps * p.clusters; e += kFigureThreads) rows[e] = 0;
  __syncthreads();

  const std::int32_t* const cluster_of = p.cluster + std::int64_t{entry} * p.rows;
  int* const own = rows + warp * p.clusters;
  for (int run = warp * kWarp; run < p.rows; run += kFigureThreads) {
    const int cluster = run + lane < p.rows ? cluster_of[run + lane] : -1;
    const unsigned group = __match_any_sync(kWholeWarp, cluster);
    if (cluster >= 0 && lane + 1 == __ffs(static_cast<int>(group))) own[cluster] += __popc(group);
    __syncwarp();
  }
  __syncthreads();

  int counts[kNumClusterFigures] = {};
  int largest = 0;
  for (int c = thread; c < p.clusters; c += kFigureThreads) {
    int of_cluster = 0;
    for (int w = 0; w < kFigureWarps; ++w) of_cluster += rows[w * p.clusters + c];
    largest = max(largest, of_cluster);
    counts[kRows] += of_cluster;
    // Clusters belong to heads, not to samples.
    if (sample > 0) continue;
    ++counts[kClusters];
    counts[kIdleClusters] +=
        p.idle_steps[head * p.idle_strides[0] + c * p.idle_strides[1]] > 0 ? 1 : 0;
  }
  const int num_compared = (p.rows + p.compared - 1) / p.compared;
  const std::int32_t* const before = p.before + std::int64_t{entry} * num_compared;
  for (int m = thread; m < num_compared; m += kFigureThreads) {
    const int cluster = cluster_of[m * p.compared];
    counts[kMovedRows] += before[m] != cluster ? 1 : 0;
    counts[kComparedRows] += cluster >= 0 ? 1 : 0;
  }
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, distance));
  }
#pragma unroll
  for (int f = 0; f < kNumClusterFigures; ++f) {
    const int sum = __reduce_add_sync(kWholeWarp, counts[f]);
    if (lane == 0) totals[warp * kNumClusterFigures + f] = f == kLargestCluster ? largest : sum;
  }
  __syncthreads();
  if (thread >= kNumClusterFigures) return;
  int total = 0;
  for (int w = 0; w < kFigureWarps; ++w) {
    const int of_warp = totals[w * kNumClusterFigures + thread];
    total = thread == kLargestCluster ? max(total, of_warp) : total + of_warp;
  }
  p.counts[entry * kNumClusterFigures + thread] = total;
}

}  // namespace

void launch_cluster_counts(const ClusterCountsParams& params, cudaStream_t stream) {
  launch({.blocks = std::int64_t{params.batch} * params.heads,
          .threads = kFigureThreads,
          .stream = stream,
          .shared_bytes = sizeof(int) * kFigureWarps *
                          static_cast<std::size_t>(params.clusters + kNumClusterFigures)},
         &counts_kernel, params);
}

}  // namespace birkhoff
