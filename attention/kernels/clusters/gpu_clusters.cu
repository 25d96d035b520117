// Clusters of unit rows (clusters.h). Legend: b sample, h head, r row, c cluster of K, d of D, n
// document.
//
//   u_rd = x_rd / |x_r|,  s_rc = sum_d x_rd mu_cd / |x_r|,  unit_rd = length u_rd,
//   c(r) = the first c with the largest s_rc,  distance = sum_r |u_r - mu_c(r)|^2
//        = sum_r (2 - 2 s_rc(r)), since centroids are unit vectors; 1 instead of 2 for x_r = 0,
//   nearest_nc = the W rows of document n with the largest s_rc, in ascending order,
//   d_x: cluster_gradients.h,  sums_cd = sum_br [c(r) = c] u_rd, and the number of these rows
//
// Scores are nearly as exact as in fp32. NaN is the smallest score for c(r) and the largest for
// nearest, as on the CPU.
//
// scores: a block of 128 threads owns 64 rows of a head and passes over a range of clusters in
//   tiles of 32, on tensor cores (gpu_scores.cuh); it keeps the best so far. With nearest rows the
//   range is a chunk of 32 clusters, whose scores it writes as integers in the same order, and
//   chunks follow each other: the only memory for scores is [B, H, 32, L], for any K. Otherwise the
//   range is all of K, and nothing is stored. Shared memory: a tile of centroids, up to 48 KiB.
// nearest: a team owns a cluster of the chunk in one document: a block of 256 threads, or a warp if
//   documents are short. 8 passes over its scores, four bits each, find the W-th largest, another
//   counts those above it and equal to it, and the last writes the rows above it and the first of
//   those equal to it. Each warp of a team has a run of successive rows.
// distances: a block owns a head. Each thread adds every 256th row, then warps add up their lanes.
// gradients: eight threads own a row.
// sums: a block owns 64 columns of a cluster of a head of a sample; each of its warps lists the
//   cluster's rows in every eighth run of 32 rows. Eight lanes add up every fourth row of a list.
//   Then the sums of lanes are added in pairs, and those of warps in order. LibTorch adds up
//   samples.
//
// Each result has one owner, which adds in a fixed order: no atomics, the same bits each time.
// Documents are read on the device, so nothing waits for the host.
#include <math.h>

#include <algorithm>

#include "attention/kernels/clusters/gpu_params.h"
#include "attention/kernels/clusters/gpu_scores.cuh"
#include "attention/kernels/common/gpu_row_team.cuh"

namespace birkhoff {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;  // except for scores

// A score and its cluster.
struct Best {
  float score;
  int cluster;

  __device__ bool beats(const Best& other) const {
    if (other.score != other.score) return score == score;
    return score > other.score || (score == other.score && cluster < other.cluster);
  }
};

static_assert(ClusterRowsParams::kChunk == kVectors);

// An integer with the order of the scores. NaN is the largest.
__device__ inline std::uint32_t key_of(float score) {
  const float number = score != score ? INFINITY : score == 0 ? 0.0f : score;  // no -0
  const std::uint32_t bits = __float_as_uint(number);
  return bits ^ (number < 0 ? 0xffffffffu : 0x80000000u);
}

// The clusters [begin, end), after those before `begin`. With kWrites they are a chunk, whose
// scores it writes.
template <typename T, bool kWrites>
__global__ void __launch_bounds__(kScoreThreads, 3)
    scores_kernel(const ClusterRowsParams p, int begin, int end) {
  const ClusterShape& shape = p.shape;
  const int D = shape.head_dim;
  const OwnRows own(shape.heads, shape.rows);
  const LaneRows<T> x(row_of<const T>(p.x, own.head, min(own.first, shape.rows - 1)),
                      p.x.strides[2], own.count);
  const VectorTile centroids{D};
  const std::int64_t first_entry = own.number * shape.rows + own.first;  // in [B, H, L]
  Best best[2];
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int64_t entry = first_entry + x.number(i);
    best[i] = begin > 0 && x.exists[i] ? Best{p.best_score[entry], p.cluster[entry]} : Best{NAN, 0};
  }
  for (int first = begin; first < end; first += kVectors) {
    __syncthreads();
    centroids.load(p.centroids + (std::int64_t{own.head.h} * shape.clusters + first) * D,
                   min(kVectors, end - first));
    __syncthreads();
    float squares[2] = {};
    const Products products(x, centroids, [&](int i, const float(&run)[kTeamColumns]) {
#pragma unroll
      for (int c = 0; c < kTeamColumns; ++c) squares[i] += run[c] * run[c];
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float square = lane_sum<kLanesOfRow>(squares[i]);
      inverse[i] = square == 0 ? 0.0f : 1 / sqrtf(square);
    }
    products.for_each([&](int i, int v, float product) {
      const Best found{product * inverse[i], first + v};
      if (found.cluster >= end) return;
      if (found.beats(best[i])) best[i] = found;
      if (kWrites && x.exists[i]) {
        const std::int64_t list = own.number * ClusterRowsParams::kChunk + v;
        p.keys[list * shape.rows + own.first + x.number(i)] = key_of(found.score);
      }
    });
    if constexpr (kWrites) break;  // a chunk is a tile
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int distance = 1; distance < kLanesOfRow; distance *= 2) {
      const Best other{__shfl_xor_sync(kWholeWarp, best[i].score, distance),
                       __shfl_xor_sync(kWholeWarp, best[i].cluster, distance)};
      if (other.beats(best[i])) best[i] = other;
    }
    if (!x.exists[i]) continue;
    const int row = own.first + x.number(i);
    const std::int64_t entry = first_entry + x.number(i);
    if (lane_number() % kLanesOfRow == 0) {
      const std::int64_t sample = p.shared_documents ? 0 : own.head.b;
      p.best_score[entry] = best[i].score;
      p.cluster[entry] = p.documents[sample * shape.rows + row] < 0 ? -1 : best[i].cluster;
      p.inverse[entry] = inverse[i];
    }
  }
  if (begin > 0) return;
  LaneRows<T>::visit_runs(D, [&](int d) {
    float runs[2][kTeamColumns];
    x.load(d, D, runs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < kTeamColumns; ++c) runs[i][c] *= inverse[i] * shape.length;
      if (!x.exists[i]) continue;
      store_run(row_of<T>(p.unit, own.head, own.first + x.number(i)), d, D, runs[i]);
    }
  });
}

// Blocks that choose the nearest rows, with kTeamWarps warps for each cluster of a document.
template <int kTeamWarps>
struct NearestTeams {
  static constexpr int kCount = kWarps / kTeamWarps;  // of a block
  // Bits of a score that a pass decides, and the values that it compares with.
  static constexpr int kBits = 4, kSteps = (1 << kBits) - 1;
  // Shared memory: numbers of each warp, for two exchanges, so that a barrier is enough for each.
  static constexpr std::size_t kBytes = kTeamWarps > 1 ? sizeof(int) * 2 * kWarps* kSteps : 0;
};

// If documents have at least as many rows on average, a block chooses those of each.
constexpr int kManyRowsOfDocument = 1024;

// The nearest rows of the clusters [begin, begin + count).
template <int kTeamWarps>
__global__ void __launch_bounds__(kThreads)
    nearest_kernel(const ClusterRowsParams p, int begin, int count) {
  using Teams = NearestTeams<kTeamWarps>;
  constexpr int kBits = Teams::kBits, kSteps = Teams::kSteps;
  const int lane = lane_number(), of_team = warp_number() % kTeamWarps;
  const std::int64_t number = std::int64_t{blockIdx.x} * Teams::kCount + warp_number() / kTeamWarps,
                     head = number / p.num_documents / count;
  const int document = static_cast<int>(number % p.num_documents),
            cluster = static_cast<int>(number / p.num_documents % count);
  if (head >= std::int64_t{p.shape.batch} * p.shape.heads) return;
  const std::int32_t* const document_ends =
      p.document_ends + (p.shared_documents ? 0 : head / p.shape.heads * p.num_documents);
  const int document_begin = document == 0 ? 0 : document_ends[document - 1],
            document_end = document_ends[document], num_rows = document_end - document_begin;
  const int segment = document * p.shape.clusters + begin + cluster;
  const std::int32_t* const ends = p.ends + head * p.num_documents * p.shape.clusters;
  const int start = segment == 0 ? 0 : ends[segment - 1], wanted = ends[segment] - start;
  const std::uint32_t* const keys =
      p.keys + (head * ClusterRowsParams::kChunk + cluster) * p.shape.rows;
  // The rows of this warp.
  const int num_runs = (num_rows + kWarp - 1) / kWarp,
            share = (num_runs + kTeamWarps - 1) / kTeamWarps * kWarp,
            first = document_begin + of_team * share, end = min(document_end, first + share);

  // Calls f(w, its kCount numbers) for each warp w of the team. All threads of the team call it.
  int exchanges = 0;
  const auto exchange = [&]<int kCount>(const int(&of_warp)[kCount], auto f) {
    if constexpr (kTeamWarps == 1) {
      f(0, of_warp);
    } else {
      int* const numbers = reinterpret_cast<int*>(score_memory) + exchanges++ % 2 * kWarps * kSteps;
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) numbers[of_team * kCount + i] = of_warp[i];
      }
      __syncthreads();
      for (int w = 0; w < kTeamWarps; ++w) f(w, numbers + w * kCount);
    }
  };

  // The wanted-th largest key: the highest value that this many keys reach. All keys are above 0.
  std::uint32_t threshold = 0;
  for (int shift = 32 - kBits; shift >= 0 && wanted < num_rows; shift -= kBits) {
    int reach[kSteps] = {};
#pragma unroll 4
    for (int row = first + lane; row < end; row += kWarp) {
      const std::uint32_t key = keys[row];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) reach[s] += key >= threshold + ((s + 1u) << shift);
    }
    int of_team_reach[kSteps] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) reach[s] = __reduce_add_sync(kWholeWarp, reach[s]);
    exchange(reach, [&](int, const int* of_warp) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) of_team_reach[s] += of_warp[s];
    });
    std::uint32_t highest = threshold;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (of_team_reach[s] >= wanted) highest = threshold + ((s + 1u) << shift);
    }
    threshold = highest;
  }
  int counts[2] = {};  // rows above the threshold and at it
#pragma unroll 8
  for (int row = first + lane; row < end; row += kWarp) {
    counts[0] += keys[row] > threshold;
    counts[1] += keys[row] == threshold;
  }
#pragma unroll
  for (int& each : counts) each = __reduce_add_sync(kWholeWarp, each);
  int above = 0, above_before = 0, tied_before = 0;  // of the team; of the warps before this one
  exchange(counts, [&](int w, const int* of_warp) {
    above += of_warp[0];
    if (w >= of_team) return;
    above_before += of_warp[0];
    tied_before += of_warp[1];
  });
  int ties = wanted - above - tied_before;  // rows at the threshold that this warp may still choose
  std::int32_t* next =
      p.nearest + head * p.slots + start + above_before + min(tied_before, wanted - above);
  const unsigned before = (1u << lane) - 1;
  for (int run = first; run < end; run += kWarp) {
    const int row = run + lane;
    const std::uint32_t key = row < end ? keys[row] : 0;
    const bool ties_here = row < end && key == threshold;
    const unsigned tied = __ballot_sync(kWholeWarp, ties_here);
    const bool chosen = key > threshold || (ties_here && __popc(tied & before) < ties);
    const unsigned all_chosen = __ballot_sync(kWholeWarp, chosen);
    if (chosen) next[__popc(all_chosen & before)] = row;
    ties -= __popc(tied);
    next += __popc(all_chosen);
  }
}

__global__ void __launch_bounds__(kThreads) distances_kernel(const ClusterRowsParams p) {
  float* const sums = reinterpret_cast<float*>(score_memory);  // [kWarps]
  float sum = 0;
  for (int row = static_cast<int>(threadIdx.x); row < p.shape.rows; row += kThreads) {
    const std::int64_t entry = std::int64_t{blockIdx.x} * p.shape.rows + row;
    if (p.cluster[entry] < 0) continue;
    sum += (p.inverse[entry] == 0 ? 1.0f : 2.0f) - 2 * p.best_score[entry];
  }
  sum = lane_sum<kWarp>(sum);
  if (lane_number() == 0) sums[warp_number()] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w];
  p.distance[blockIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kTeamThreads) gradients_kernel(const ClusterGradientParams p) {
  const ClusterShape& shape = p.shape;
  const TeamNumber own(static_cast<unsigned>(shape.batch * shape.heads) *
                       static_cast<unsigned>(shape.rows));
  const int entry = own.number, of_all = entry / shape.rows, row = entry - of_all * shape.rows;
  const GpuHead head{of_all / shape.heads, of_all % shape.heads};
  const std::int32_t cluster = p.cluster[entry];
  const float factor = p.d_distance == nullptr || cluster < 0
                           ? 0.0f
                           : 2 * p.d_distance[head.b * shape.heads + head.h];
  const float* const centroid =
      p.centroids + (std::int64_t{head.h} * shape.clusters + max(cluster, 0)) * shape.head_dim;
  const T* const unit = row_of<const T>(p.unit, head, row);
  const T* const d_unit = p.d_unit.data == nullptr ? nullptr : row_of<const T>(p.d_unit, head, row);
  T* const d_x = row_of<T>(p.d_x, head, row);
  // u and the gradient of a run of columns.
  const float of_length = 1 / shape.length;
  const auto load = [&](int first, float(&u)[kTeamColumns], float(&g)[kTeamColumns]) {
    float of_centroid[kTeamColumns];
    load_run(unit, first, shape.head_dim, u);
    load_run(centroid, first, shape.head_dim, of_centroid);
    if (d_unit != nullptr) load_run(d_unit, first, shape.head_dim, g);
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) {
      u[c] *= of_length;
      g[c] = d_unit == nullptr ? 0.0f : shape.length * g[c];
      if (factor != 0) g[c] += factor * (u[c] - of_centroid[c]);
    }
  };
  float along = 0;
  visit_runs(own.member, shape.head_dim, [&](int first) {
    float u[kTeamColumns], g[kTeamColumns] = {};
    load(first, u, g);
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) along += u[c] * g[c];
  });
  along = lane_sum<kRowTeam>(along);
  if (!own.exists) return;
  visit_runs(own.member, shape.head_dim, [&](int first) {
    float u[kTeamColumns], g[kTeamColumns] = {};
    load(first, u, g);
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) g[c] = (g[c] - u[c] * along) * p.inverse[entry];
    store_run(d_x, first, shape.head_dim, g);
  });
}

constexpr int kSumColumns = ClusterSumsParams::kColumns;
constexpr int kListedRows = 256;  // that a warp of sums lists, at most
constexpr int kRunsAtOnce = 4;    // of 32 rows, whose clusters it loads together
static_assert(kSumColumns == kRowTeam * kTeamColumns);

template <typename T>
__global__ void __launch_bounds__(kThreads, 3) sums_kernel(const ClusterSumsParams p) {
  constexpr int kTeams = kWarp / kRowTeam;
  const ClusterShape& shape = p.shape;
  const int D = shape.head_dim, lane = lane_number(), warp = warp_number(), team = lane / kRowTeam;
  const int parts = p.parts(), part = static_cast<int>(blockIdx.x) % parts,
            entry = static_cast<int>(blockIdx.x) / parts;  // in [B, H, K]
  const int cluster = entry % shape.clusters, head = entry / shape.clusters;
  const int first_column = part * kSumColumns,
            first = first_column + lane % kRowTeam * kTeamColumns;
  const GpuHead of{head / shape.heads, head % shape.heads};
  float* const sums = reinterpret_cast<float*>(score_memory);  // [kWarps, kSumColumns]
  int* const counts = reinterpret_cast<int*>(sums + kWarps * kSumColumns);
  int* const listed = counts + kWarps + warp * kListedRows;
  float sum[kTeamColumns] = {};
  int count = 0, num_listed = 0;
  const auto add_listed = [&] {
    __syncwarp();
#pragma unroll 4
    for (int i = team; i < num_listed; i += kTeams) {
      float run[kTeamColumns];
      load_run(row_of<const T>(p.unit, of, listed[i]), first, D, run);
#pragma unroll
      for (int c = 0; c < kTeamColumns; ++c) sum[c] += run[c];
    }
    __syncwarp();
    count += num_listed;
    num_listed = 0;
  };
  const std::int32_t* const clusters = p.cluster + std::int64_t{head} * shape.rows;
  for (int run = warp * kWarp; run < shape.rows; run += kRunsAtOnce * kThreads) {
    std::int32_t of_rows[kRunsAtOnce];
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      const int row = run + i * kThreads + lane;
      of_rows[i] = row < shape.rows ? clusters[row] : -1;
    }
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      const unsigned members = __ballot_sync(kWholeWarp, of_rows[i] == cluster);
      if (of_rows[i] == cluster) {
        listed[num_listed + __popc(members & ((1u << lane) - 1))] = run + i * kThreads + lane;
      }
      num_listed += __popc(members);
    }
    if (num_listed > kListedRows - kRunsAtOnce * kWarp) add_listed();
  }
  add_listed();
#pragma unroll
  for (int c = 0; c < kTeamColumns; ++c) {
#pragma unroll
    for (int distance = kRowTeam; distance < kWarp; distance *= 2) {
      sum[c] += __shfl_xor_sync(kWholeWarp, sum[c], distance);
    }
    if (team == 0) sums[warp * kSumColumns + first - first_column + c] = sum[c];
  }
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  const int d = first_column + static_cast<int>(threadIdx.x);
  float* const results = p.sums + std::int64_t{entry} * (D + 1);
  if (threadIdx.x < kSumColumns && d < D) {
    float total = 0;
    for (int w = 0; w < kWarps; ++w) total += sums[w * kSumColumns + d - first_column];
    results[d] = total / shape.length;
  }
  if (part == 0 && threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) count += counts[w];
    results[D] = static_cast<float>(count);
  }
}

}  // namespace

void launch_cluster_rows(const ClusterRowsParams& params, cudaStream_t stream) {
  const ClusterShape& shape = params.shape;
  const std::int64_t heads = std::int64_t{shape.batch} * shape.heads;
  const int chunk = params.keys == nullptr ? shape.clusters : ClusterRowsParams::kChunk;
  for (int begin = 0; begin < shape.clusters; begin += chunk) {
    const int count = std::min(chunk, shape.clusters - begin);
    with_element_type(shape.dtype, [&]<typename T>() {
      const auto kernel =
          params.keys == nullptr ? &scores_kernel<T, false> : &scores_kernel<T, true>;
      launch_tiles(kernel, heads, shape.rows, kScoreThreads, VectorTile::bytes(shape.head_dim),
                   stream, params, begin, begin + count);
    });
    if (params.keys == nullptr) continue;
    const std::int64_t teams = heads * count * params.num_documents;
    const auto launch_nearest = [&]<int kTeamWarps>() {
      using Teams = NearestTeams<kTeamWarps>;
      launch({.blocks = (teams + Teams::kCount - 1) / Teams::kCount,
              .threads = kThreads,
              .stream = stream,
              .shared_bytes = Teams::kBytes},
             &nearest_kernel<kTeamWarps>, params, begin, count);
    };
    if (shape.rows / params.num_documents >= kManyRowsOfDocument) {
      launch_nearest.template operator()<kWarps>();
    } else {
      launch_nearest.template operator()<1>();
    }
  }
  launch({.blocks = heads,
          .threads = kThreads,
          .stream = stream,
          .shared_bytes = sizeof(float) * kWarps},
         &distances_kernel, params);
}

void launch_cluster_gradients(const ClusterGradientParams& params, cudaStream_t stream) {
  const std::int64_t rows =
      std::int64_t{params.shape.batch} * params.shape.heads * params.shape.rows;
  with_element_type(params.shape.dtype, [&]<typename T>() {
    launch({.blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock,
            .threads = kTeamThreads,
            .stream = stream},
           &gradients_kernel<T>, params);
  });
}

void launch_cluster_sums(const ClusterSumsParams& params, cudaStream_t stream) {
  const ClusterShape& shape = params.shape;
  with_element_type(shape.dtype, [&]<typename T>() {
    launch({.blocks = std::int64_t{shape.batch} * shape.heads * shape.clusters * params.parts(),
            .threads = kThreads,
            .stream = stream,
            .shared_bytes = sizeof(float) * kWarps * (kSumColumns + 1 + kListedRows)},
           &sums_kernel<T>, params);
  });
}

}  // namespace birkhoff
