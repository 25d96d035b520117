// Counts of rows and clusters for metrics (cluster_figures.h), and rows that may become centroids
// (cluster_seeds.h).
//
// counts: a block of 256 threads owns a head of a sample. Each of its warps counts the rows of
//   each cluster in every eighth run of 32 rows, in shared memory: of the lanes whose rows are in
//   one cluster, the first adds their number. Then each thread adds up clusters and compared rows,
//   and the threads are added up. Integers, no atomics.
// seeds: a warp owns a cluster of a head. It draws a sample and a row from the noise, and copies
//   the row if the sample is here.
#include "attention/kernels/clusters/gpu_params.h"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"
#include "cluster/base/random/philox_rounds.h"

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

// The index that a uniform number in (0, 1] chooses among `count`; -1 of none.
__device__ inline std::int64_t chosen_of(float uniform, std::int64_t count) {
  return static_cast<std::int64_t>(ceilf(uniform * static_cast<float>(count))) - 1;
}

// The rows before padding, which comes last.
__device__ inline int existing_rows(const std::int32_t* documents, int rows) {
  int least = 0, most = rows;
  while (least < most) {
    const int middle = (least + most) / 2;
    if (documents[middle] >= 0) {
      least = middle + 1;
    } else {
      most = middle;
    }
  }
  return least;
}

template <typename T>
__global__ void __launch_bounds__(kFigureThreads) seeds_kernel(const ClusterSeedsParams p) {
  const ClusterShape& shape = p.shape;
  const int entry = static_cast<int>(blockIdx.x) * kFigureWarps + warp_number(),
            lane = lane_number();  // entry: in [H, K]
  if (entry >= shape.heads * shape.clusters) return;
  // philox_uniform() of [heads of all ranks, K, 2]: two words of one counter.
  const std::uint64_t element =
      2 * (static_cast<std::uint64_t>(p.first_head) * static_cast<std::uint64_t>(shape.clusters) +
           static_cast<std::uint64_t>(entry));
  const PhiloxBlock four =
      philox_block(mixed_noise_key(p.seed, static_cast<std::uint64_t>(*p.step), p.layer, p.purpose),
                   0, element / 4);
  const bool second = element % 4 != 0;
  const float for_sample = uniform_of(second ? four.words[2] : four.words[0]),
              for_row = uniform_of(second ? four.words[3] : four.words[1]);
  const std::int64_t last = p.global_batch - 1,
                     chosen =
                         max(min(chosen_of(for_sample, p.global_batch), last), std::int64_t{0});
  int sample = -1;
  for (int b = lane; b < shape.batch; b += kWarp) {
    if (p.sample_ids[b] % p.global_batch == chosen) sample = b;
  }
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    sample = max(sample, __shfl_xor_sync(kWholeWarp, sample, distance));
  }
  float* const seed = p.seeds + std::int64_t{entry} * shape.head_dim;
  const T* row = nullptr;
  if (sample >= 0) {
    const int rows = existing_rows(
        p.documents + (p.shared_documents ? 0 : std::int64_t{sample} * shape.rows), shape.rows);
    row = row_of<const T>(p.unit, {sample, entry / shape.clusters},
                          max(chosen_of(for_row, rows), std::int64_t{0}));
  }
  for (int d = lane; d < shape.head_dim; d += kWarp) {
    seed[d] = row == nullptr ? 0.0f : to_float(row[d]) / shape.length;
  }
}

}  // namespace

void launch_cluster_seeds(const ClusterSeedsParams& params, cudaStream_t stream) {
  const std::int64_t seeds = std::int64_t{params.shape.heads} * params.shape.clusters;
  with_element_type(params.shape.dtype, [&]<typename T>() {
    launch({.blocks = (seeds + kFigureWarps - 1) / kFigureWarps,
            .threads = kFigureThreads,
            .stream = stream},
           &seeds_kernel<T>, params);
  });
}

void launch_cluster_counts(const ClusterCountsParams& params, cudaStream_t stream) {
  launch({.blocks = std::int64_t{params.batch} * params.heads,
          .threads = kFigureThreads,
          .stream = stream,
          .shared_bytes = sizeof(int) * kFigureWarps *
                          static_cast<std::size_t>(params.clusters + kNumClusterFigures)},
         &counts_kernel, params);
}

}  // namespace birkhoff
