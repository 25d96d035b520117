// The Sinkhorn operator for all prefixes of a matrix (attention/balance.h, prefix_balance): forward
// and backward. Legend: r destination and c source of N, u prefix, i iteration of I, E = exp(S) and
// 0 where S is -inf; r <= u and c < u in all that belongs to prefix u.
//
//   b_ui[c] = 1 / sum_r a_ui[r] E[r, c]      a_u0 = 1
//   a_u,i+1[r] = 1 / sum_c E[r, c] b_ui[c]   P[u, c] = E[u, c] b_u,I-1[c] a_uI[u]
//
// Backward, from i = I - 1 down; the last row step's share is in d, where it cancels best:
//
//   d_u[c] = P[u, c] (dLoss/dP[u, c] - sum_c' P[u, c'] dLoss/dP[u, c'])
//   x_ui[r] = 0, then -a_u,i+1[r]^2 sum_c E[r, c] y_u,i+1[c]
//   y_ui[c] = d_u[c] b_ui[c], then -b_ui[c]^2 sum_r x_ui[r] E[r, c]
//   dS[r, c] = d_r[c] - E[r, c] sum_ui (x_ui[r] b_ui[c] + a_ui[r] y_ui[c])
//
// N <= 256, fp32, kernels one after another:
//
// exponentials: a block of 256 threads writes a tile of 32 x 32 of E and of its transpose, and the
//   first prefix that holds a score too far from 0 (balance_range.h). There is no shift: none can
//   then depend on later scores.
// forward, vectors: a block of 256 threads owns a panel of K successive prefixes of a matrix, K =
// 16
//   or, for N > 128, 32: a step is the product of its [K, N] scalings and E or its transpose. A
//   warp owns 16 prefixes x 64 columns, a thread 8 x 4 of them; where that is not work for 8 warps
//   (N <= 128) they share the sums out between 8 or 4 of them, added up in a fixed order. Scalings
//   lie in shared memory (with the sums of each warp 38 to 66 KiB); E is read once in each step,
//   from L1 where it fits (N <= 128), else from L2.
//   Prefixes whose scores or sums leave the number range are solved again, one by one, in the log
//   domain (balance_log_domain.cuh), by the same block or, backward, by one of a kernel of their
//   own, log_domain: nothing waits for the host.
// scores: a block of 256 threads owns a tile of dS, T x T with T = 32 or, for N > 64, 64: a matrix
//   product over all (u, i), of which a group of 64 threads takes a fourth; shared memory 16 or 32
//   KiB.
//
// Vectors are 0 beyond their prefix, so a prefix has the same bits whatever follows it. No atomics,
// all orders fixed: deterministic.
#include <algorithm>

#include "attention/balance_log_domain.cuh"
#include "attention/balance_range.h"
#include "attention/prefix_balance_gpu.h"

namespace birkhoff {
namespace {

// As many as a matrix has prefixes at most.
constexpr int kThreads = BalanceParams::kMostBlocks, kWarps = kThreads / kWarp;
constexpr int kTile = BalanceParams::kTile;
constexpr int kPrefixTile = 16;  // prefixes of a warp

// A problem that has left the number range, in blocks like all others here.
template <int kGroups>
using LogDomain = LogDomainProblem<kGroups, kWarps, false>;

// The scratch memory of a call: of each matrix E, its transpose, the limits of its tiles, and of
// each problem whether it is solved.
struct Scratch {
  int width;  // N, padded
  int tiles;
  float *e, *e_t;        // [matrices, width, width], 0 beyond N
  float* limits;         // [matrices, tiles]: the first prefix that no number range holds
  float* in_log_domain;  // [matrices, results]: 1 or 0

  __device__ explicit Scratch(const BalanceParams& p)
      : width(BalanceParams::padded(p.rows)),
        tiles(p.num_tiles()),
        e(p.scratch),
        e_t(e + p.matrices * width * width),
        limits(e_t + p.matrices * width * width),
        in_log_domain(limits + p.matrices * tiles) {}
};

__global__ void __launch_bounds__(kThreads) exponentials_kernel(const BalanceParams p) {
  const Scratch scratch(p);
  const int N = p.rows, width = scratch.width, side = (N + kTile - 1) / kTile;
  const std::int64_t matrix = blockIdx.x / scratch.tiles;
  const int tile = static_cast<int>(blockIdx.x % scratch.tiles);
  const int r0 = tile / side * kTile, c0 = tile % side * kTile;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float* transposed = reinterpret_cast<float*>(balance_memory);  // [kTile, kTile + 1]
  float* least = transposed + kTile * (kTile + 1);               // [kWarps]
  float limit = static_cast<float>(N);
  for (int row = warp; row < kTile; row += kWarps) {
    const int r = r0 + row, c = c0 + lane;
    const float s = r < N && c < N ? p.scores[(matrix * N + r) * N + c] : -INFINITY;
    const bool in_range = fabsf(s) <= DeviceBalanceRange::kSpread;
    // The first prefix that holds the entry is u = max(r, c + 1).
    if (!in_range && s != -INFINITY) limit = fminf(limit, static_cast<float>(max(r, c + 1)));
    const float e = in_range ? expf(s) : 0.0f;
    transposed[lane * (kTile + 1) + row] = e;
    if (r < width && c < width) scratch.e[(matrix * width + r) * width + c] = e;
  }
  limit = -warp_max(-limit);
  if (lane == 0) least[warp] = limit;
  __syncthreads();
  for (int column = warp; column < kTile; column += kWarps) {
    const int r = r0 + lane, c = c0 + column;
    if (r < width && c < width) {
      scratch.e_t[(matrix * width + c) * width + r] = transposed[column * (kTile + 1) + lane];
    }
  }
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) limit = fminf(limit, least[w]);
    scratch.limits[matrix * scratch.tiles + tile] = limit;
  }
}

// A panel of prefixes as its block sees it. kGroups: 2, 4, 8 for N <= 64, 128, 256.
template <int kGroups>
struct Panel {
  static constexpr int kColumnTiles = kGroups / 2;                // of 64 columns
  static constexpr int kPrefixTiles = kColumnTiles == 4 ? 2 : 1;  // of kPrefixTile prefixes
  static constexpr int kSplits = kWarps / (kColumnTiles * kPrefixTiles);
  static constexpr int kPrefixes = kPrefixTile * kPrefixTiles;

  int size, width, matrix, first_prefix;
  const float *e, *e_t;  // of this matrix
  int warp, lane;

  // Blocks of the longest prefixes come first: they take longest.
  __device__ explicit Panel(const BalanceParams& p)
      : size(p.rows),
        width(BalanceParams::padded(p.rows)),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp) {
    const int panels = num_panels(p.results);
    const int index = panels - 1 - static_cast<int>(blockIdx.x / p.matrices);
    matrix = static_cast<int>(blockIdx.x % p.matrices);
    first_prefix = p.first_row + index * kPrefixes;
    const Scratch scratch(p);
    e = scratch.e + std::int64_t{matrix} * width * width;
    e_t = scratch.e_t + std::int64_t{matrix} * width * width;
    float limit = static_cast<float>(size);
    for (int tile = 0; tile < scratch.tiles; ++tile) {
      limit = fminf(limit, scratch.limits[std::int64_t{matrix} * scratch.tiles + tile]);
    }
    for (int k = static_cast<int>(threadIdx.x); k < kPrefixes; k += kThreads) {
      failed()[k] = static_cast<float>(first_prefix + k) >= limit ? 1.0f : 0.0f;
    }
    for (int j = static_cast<int>(threadIdx.x); j < width * kPrefixes; j += kThreads) {
      panel()[j] = j / kPrefixes <= first_prefix + j % kPrefixes ? 1.0f : 0.0f;  // a_u0
    }
    __syncthreads();
  }

  // Shared memory: [kPrefixes], 1 where a prefix is not solved; [width, kPrefixes], the left factor
  // of a step, transposed; [kSplits, kPrefixes, width + 4], the splits' sums and then, in [0], the
  // step's result. + 4: for the banks.
  __device__ static float* failed() { return reinterpret_cast<float*>(balance_memory); }
  __device__ static float* panel() { return failed() + kPrefixes; }
  __device__ float* sums() const { return panel() + width * kPrefixes; }

  __host__ __device__ static int num_panels(int results) {
    return (results + kPrefixes - 1) / kPrefixes;
  }
  static std::size_t shared_bytes(int size) {
    const int width = BalanceParams::padded(size);
    const int numbers = kPrefixes * (1 + width + kSplits * (width + 4));
    return std::max(sizeof(float) * static_cast<std::size_t>(numbers),
                    LogDomain<kGroups>::shared_bytes(size, size));
  }

  // Result of the last step for prefix k: [width].
  __device__ float* result(int k) const { return sums() + k * (width + 4); }

  // panel = update(panel factor), for factor E (kColumnStep, from rows to columns) or its
  // transpose. update(k, j, x) changes numbers j .. j + 3 of prefix k, in one thread, the same one
  // in each step; what lies beyond the prefix becomes 0. Called by all threads of the block; they
  // see what `update` wrote.
  template <bool kColumnStep, typename Update>
  __device__ void step(const float* factor, Update update) const {
    constexpr int kRowsMore = kColumnStep ? 1 : 0, kResultsMore = 1 - kRowsMore;
    {
      const int split = warp % kSplits, tile = warp / kSplits;
      const int k0 = tile / kColumnTiles * kPrefixTile + lane / 16 * 8;
      const int c0 = tile % kColumnTiles * 64 + lane % 16 * 4;
      const int last = min(first_prefix + (tile / kColumnTiles + 1) * kPrefixTile, size) - 1;
      const int depth = last + kRowsMore;
      if (c0 < last + kResultsMore) {
        float sum[8][4] = {};
        const float* factors = panel() + split * kPrefixes + k0;
        const float* row = factor + split * width + c0;
        const int row_step = kSplits * width;
#pragma unroll 3
        for (int r = split; r < depth; r += kSplits) {
          const float4 m = *reinterpret_cast<const float4*>(row);
          const float4 low = *reinterpret_cast<const float4*>(factors);
          const float4 high = *reinterpret_cast<const float4*>(factors + 4);
          row += row_step;
          factors += kSplits * kPrefixes;
          const float f[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            sum[k][0] += f[k] * m.x;
            sum[k][1] += f[k] * m.y;
            sum[k][2] += f[k] * m.z;
            sum[k][3] += f[k] * m.w;
          }
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          *reinterpret_cast<float4*>(sums() + (split * kPrefixes + k0 + k) * (width + 4) + c0) = {
              sum[k][0], sum[k][1], sum[k][2], sum[k][3]};
        }
      }
    }
    __syncthreads();
    for_own([&](int k, int j) {
      const int end = first_prefix + k + kResultsMore;
      float x[4] = {};
      if (j < end) {
#pragma unroll
        for (int split = 0; split < kSplits; ++split) {
          const float4 part =
              *reinterpret_cast<const float4*>(sums() + (split * kPrefixes + k) * (width + 4) + j);
          x[0] += part.x;
          x[1] += part.y;
          x[2] += part.z;
          x[3] += part.w;
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = j + n < end ? x[n] : 0.0f;
      update(k, j, x);
      store(k, j, x);
    });
    __syncthreads();
  }

  // Calls use(k, j) for the prefixes k and groups of 4 numbers from j on that this thread owns.
  template <typename Use>
  __device__ void for_own(Use use) const {
    const int k = static_cast<int>(threadIdx.x) % kPrefixes;
    if (first_prefix + k >= size) return;
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x) / kPrefixes * 4; j < width;
         j += kThreads / kPrefixes * 4) {
      use(k, j);
    }
  }

  __device__ void store(int k, int j, const float (&x)[4]) const {
    *reinterpret_cast<float4*>(result(k) + j) = {x[0], x[1], x[2], x[3]};
#pragma unroll
    for (int n = 0; n < 4; ++n) panel()[(j + n) * kPrefixes + k] = x[n];
  }

  // 1 / x where x > 0, else 0; prefix k has failed if x is out of range.
  __device__ float inverse(float x, int k) const {
    if (x == 0) return 0;
    if (!(x > DeviceBalanceRange::kLeast && x < 1 / DeviceBalanceRange::kLeast)) failed()[k] = 1;
    return 1 / x;
  }

  // All column steps and the row steps between; each_a(i, k, j, x) and each_b(i, k, j, x) are told
  // what a_ui and b_ui are. Then the last row step, of row u alone: a warp for each prefix calls
  // each_result(k, u, 1 / a_uI[u]), the same in all lanes, with b_u,I-1 in result(k).
  template <typename EachA, typename EachB, typename EachResult>
  __device__ void solve(int iterations, EachA each_a, EachB each_b, EachResult each_result) const {
    for (int i = 0; i < iterations; ++i) {
      if (i > 0) {
        step<false>(e_t, [&](int k, int j, float(&x)[4]) {
#pragma unroll
          for (int n = 0; n < 4; ++n) x[n] = inverse(x[n], k);
          each_a(i, k, j, x);
        });
      }
      step<true>(e, [&](int k, int j, float(&x)[4]) {
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = inverse(x[n], k);
        each_b(i, k, j, x);
      });
    }
    for (int k = warp; k < kPrefixes; k += kWarps) {
      const int u = first_prefix + k;
      if (u >= size) break;
      float sum = 0;
      for (int c = lane; c < u; c += kWarp) sum += e[u * width + c] * result(k)[c];
      sum = warp_sum(sum);
      inverse(sum, k);  // P is a quotient: 1 where it has one term
      each_result(k, u, sum > 0 ? sum : 1.0f);
    }
    __syncthreads();
  }
};

template <int kGroups>
__global__ void __launch_bounds__(kThreads, 2) prefix_forward_kernel(const BalanceParams p) {
  const Panel<kGroups> panel(p);
  const int N = p.rows;
  const auto nothing = [](int, int, int, const float(&)[4]) {};
  panel.solve(p.iterations, nothing, nothing, [&](int k, int u, float total) {
    const float* e = panel.e + u * panel.width;
    const float* b = panel.result(k);
    float* out = p.p + (std::int64_t{panel.matrix} * p.results + u - p.first_row) * N;
    for (int c = panel.lane; c < N; c += kWarp) out[c] = c < u ? e[c] * b[c] / total : 0.0f;
  });
  for (int k = 0; k < panel.kPrefixes && panel.first_prefix + k < N; ++k) {
    if (panel.failed()[k] == 0) continue;
    const LogDomain<kGroups> problem(p, panel.matrix, panel.first_prefix + k - p.first_row,
                                     panel.panel());
    problem.write_p(p.iterations, p.p);
    __syncthreads();
  }
}

// Of solved prefixes, Vectors' f is a_ui and its g is b_ui. Row u of d_scores becomes d.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 2)
    prefix_vectors_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const Panel<kGroups> panel(forward);
  const int N = forward.rows, I = forward.iterations;
  const int first_problem = panel.matrix * forward.results + panel.first_prefix - forward.first_row;
  const auto write = [](float* vector, int j, const float(&x)[4]) {
    *reinterpret_cast<float4*>(vector + j) = {x[0], x[1], x[2], x[3]};
  };
  // x = -factors^2 x; the square itself could leave the number range.
  const auto flow_back = [](const float* factors, int j, float(&x)[4]) {
    const float4 f = *reinterpret_cast<const float4*>(factors + j);
    x[0] = -(x[0] * f.x) * f.x;
    x[1] = -(x[1] * f.y) * f.y;
    x[2] = -(x[2] * f.z) * f.z;
    x[3] = -(x[3] * f.w) * f.w;
  };

  panel.for_own([&](int k, int j) {
    const int u = panel.first_prefix + k;
    const float ones[4] = {j <= u ? 1.0f : 0.0f, j + 1 <= u ? 1.0f : 0.0f, j + 2 <= u ? 1.0f : 0.0f,
                           j + 3 <= u ? 1.0f : 0.0f};
    write(Vectors(p, first_problem + k).f(0), j, ones);
  });
  panel.solve(
      I,
      [&](int i, int k, int j, const float(&x)[4]) {
        write(Vectors(p, first_problem + k).f(i), j, x);
      },
      [&](int i, int k, int j, const float(&x)[4]) {
        write(Vectors(p, first_problem + k).g(i), j, x);
      },
      [&](int k, int u, float total) {
        const float* e = panel.e + u * panel.width;
        float* b = panel.result(k);
        const float* d_p = p.d_p + std::int64_t{first_problem + k} * N;
        float* d_scores = p.d_scores + (std::int64_t{panel.matrix} * N + u) * N;
        float sum = 0;
        for (int c = panel.lane; c < u; c += kWarp) sum += e[c] * b[c] / total * d_p[c];
        sum = warp_sum(sum);
        for (int c = panel.lane; c < u; c += kWarp) {
          const float d = e[c] * b[c] / total * (d_p[c] - sum);
          d_scores[c] = d;
          b[c] *= d;  // y
        }
      });
  panel.for_own([&](int k, int j) {
    const float* y = panel.result(k) + j;
    const float four[4] = {y[0], y[1], y[2], y[3]};
    const float zeros[4] = {};
    write(Vectors(p, first_problem + k).y(I - 1), j, four);
    write(Vectors(p, first_problem + k).x(I - 1), j, zeros);
    panel.store(k, j, four);
  });
  __syncthreads();
  for (int i = I - 2; i >= 0; --i) {
    panel.template step<false>(panel.e_t, [&](int k, int j, float(&x)[4]) {
      const Vectors vectors(p, first_problem + k);
      flow_back(vectors.f(i + 1), j, x);
      write(vectors.x(i), j, x);
    });
    panel.template step<true>(panel.e, [&](int k, int j, float(&y)[4]) {
      const Vectors vectors(p, first_problem + k);
      flow_back(vectors.g(i), j, y);
      write(vectors.y(i), j, y);
    });
  }
  float* in_log_domain = Scratch(forward).in_log_domain + first_problem;
  for (int k = static_cast<int>(threadIdx.x); k < panel.kPrefixes; k += kThreads) {
    if (panel.first_prefix + k < N) in_log_domain[k] = panel.failed()[k];
  }
}

// The prefixes of a panel that prefix_vectors_kernel has not solved: with it in one kernel there
// are not enough registers.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1)
    prefix_log_domain_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const int first = static_cast<int>(blockIdx.x / forward.matrices) * kPrefixTile;
  const std::int64_t matrix = blockIdx.x % forward.matrices;
  const float* in_log_domain = Scratch(forward).in_log_domain + matrix * forward.results;
  for (int result = first; result < min(first + kPrefixTile, forward.results); ++result) {
    if (in_log_domain[result] == 0) continue;
    const LogDomain<kGroups> problem(forward, matrix, result,
                                     reinterpret_cast<float*>(balance_memory));
    problem.write_vectors(forward.iterations, p.d_p, Vectors(p, matrix * forward.results + result),
                          p.d_scores + matrix * forward.rows * forward.columns);
    __syncthreads();
  }
}

// kSide^2 numbers of the tile are a thread's, in groups of 4 x 4.
template <int kSide>
__global__ void __launch_bounds__(kThreads, 2) prefix_scores_kernel(const BalanceBackwardParams p) {
  constexpr int kSize = 8 * kSide, kParts = 4;  // of the tile; groups of 64 threads
  constexpr int kPairs = 32;                    // (u, i) at a time
  const BalanceParams& forward = p.problems;
  const Scratch scratch(forward);
  const int N = forward.rows, width = scratch.width, I = forward.iterations;
  const int side = (N + kSize - 1) / kSize, thread = static_cast<int>(threadIdx.x);
  // The first tiles of a matrix take longest: those of all matrices come first.
  const std::int64_t matrix = blockIdx.x % forward.matrices;
  const int tile = static_cast<int>(blockIdx.x / forward.matrices);
  const int r0 = tile / side * kSize, c0 = tile % side * kSize;
  const std::int64_t problems = matrix * forward.results;
  const float* in_log_domain = scratch.in_log_domain + problems;

  float* left = reinterpret_cast<float*>(balance_memory);  // [2 kPairs, kSize]: a and x
  float* right = left + 2 * kPairs * kSize;                // so: y and b
  const int part = thread / 64, row = thread % 64 / 8 * 4, column = thread % 8 * 4;
  float sum[kSide][kSide] = {};
  // The first prefix that holds an entry is u = max(r, c + 1).
  const int first = max(max(r0, c0 + 1) - forward.first_row, 0);
  const int num_pairs = (forward.results - first) * I;
  for (int pair = 0; pair < num_pairs; pair += kPairs) {
    for (int j = thread; j < 4 * kPairs * (kSize / 4); j += kThreads) {
      const int offset = j % (kSize / 4) * 4, vector = j / (kSize / 4) % 4;
      const int place = j / kSize;  // of the pair
      const int result = first + (pair + place) / I, i = (pair + place) % I;
      const bool is_left = vector < 2;
      const int begin = (is_left ? r0 : c0) + offset;
      float4 x = {0, 0, 0, 0};
      if (pair + place < num_pairs && begin < width && in_log_domain[result] == 0) {
        const Vectors vectors(p, problems + result);
        const float* from = vector == 0   ? vectors.f(i)
                            : vector == 1 ? vectors.x(i)
                            : vector == 2 ? vectors.y(i)
                                          : vectors.g(i);
        x = *reinterpret_cast<const float4*>(from + begin);
      }
      float* to = (is_left ? left : right) + (2 * place + vector % 2) * kSize + offset;
      *reinterpret_cast<float4*>(to) = x;
    }
    __syncthreads();
#pragma unroll 2
    for (int d = part; d < 2 * kPairs; d += kParts) {
      float l[kSide], r[kSide];
#pragma unroll
      for (int n = 0; n < kSide; n += 4) {
        const float4 l4 = *reinterpret_cast<const float4*>(left + d * kSize + row + n * 8);
        const float4 r4 = *reinterpret_cast<const float4*>(right + d * kSize + column + n * 8);
        l[n] = l4.x, l[n + 1] = l4.y, l[n + 2] = l4.z, l[n + 3] = l4.w;
        r[n] = r4.x, r[n + 1] = r4.y, r[n + 2] = r4.z, r[n + 3] = r4.w;
      }
#pragma unroll
      for (int m = 0; m < kSide; ++m) {
#pragma unroll
        for (int n = 0; n < kSide; ++n) sum[m][n] += l[m] * r[n];
      }
    }
    __syncthreads();
  }

  // The parts' sums, in their order; then whole rows of the tile at a time.
  float* flow = left;  // [kSize, kSize]
  float& any_in_log_domain = right[0];
  if (thread == 0) any_in_log_domain = 0;
  __syncthreads();
  if (thread < forward.results && in_log_domain[thread] != 0) any_in_log_domain = 1;
  for (int turn = 0; turn < kParts; ++turn) {
    if (part == turn) {
#pragma unroll
      for (int m = 0; m < kSide; ++m) {
#pragma unroll
        for (int n = 0; n < kSide; ++n) {
          float& to = flow[(row + m / 4 * 32 + m % 4) * kSize + column + n / 4 * 32 + n % 4];
          to = turn == 0 ? sum[m][n] : to + sum[m][n];
        }
      }
    }
    __syncthreads();
  }
  for (int j = thread; j < kSize * kSize; j += kThreads) {
    const int r = r0 + j / kSize, c = c0 + j % kSize;
    if (r >= N || c >= N) continue;
    const std::int64_t entry = (matrix * N + r) * N + c;
    const float s = forward.scores[entry];
    float d = r >= forward.first_row && c < r ? p.d_scores[entry] : 0.0f;
    d -= scratch.e[(matrix * width + r) * width + c] * flow[j];
    int result = max(max(r, c + 1) - forward.first_row, 0);
    if (any_in_log_domain == 0) result = forward.results;
    for (; result < forward.results; ++result) {
      if (in_log_domain[result] == 0) continue;
      d -= log_domain_share(Vectors(p, problems + result), I, r, c, s);
    }
    p.d_scores[entry] = s == -INFINITY ? 0.0f : d;
  }
}

template <typename Params>
void launch_blocks(void (*kernel)(Params), std::int64_t blocks, const Params& params,
                   std::size_t shared_bytes, cudaStream_t stream) {
  launch({.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .stream = stream,
          .shared_bytes = shared_bytes},
         kernel, params);
}

// As launch_blocks, for panels: their kernels may take more shared memory than others, and no more
// than half of all, since the rest is the L1 that holds E.
template <int kGroups, typename Params>
void launch_panels(void (*kernel)(Params), const BalanceParams& p, const Params& params,
                   cudaStream_t stream) {
  const std::size_t shared_bytes = Panel<kGroups>::shared_bytes(p.rows);
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value),
               "cudaFuncSetAttribute");
  };
  set(cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  set(cudaFuncAttributePreferredSharedMemoryCarveout, 50);
  launch_blocks(kernel, p.matrices * Panel<kGroups>::num_panels(p.results), params, shared_bytes,
                stream);
}

// Calls use<kGroups>().
template <typename Use>
void with_groups(int size, Use use) {
  if (size <= 64) return use.template operator()<2>();
  if (size <= 128) return use.template operator()<4>();
  use.template operator()<8>();
}

void launch_exponentials(const BalanceParams& p, cudaStream_t stream) {
  launch_blocks(&exponentials_kernel, p.matrices * p.num_tiles(), p,
                sizeof(float) * (kTile * (kTile + 1) + kWarps), stream);
}

template <int kSide>
void launch_scores(const BalanceBackwardParams& params, cudaStream_t stream) {
  constexpr int kSize = 8 * kSide;
  const int side = (params.problems.rows + kSize - 1) / kSize;
  launch_blocks(&prefix_scores_kernel<kSide>, params.problems.matrices * side * side, params,
                sizeof(float) * 4 * 32 * kSize, stream);
}

}  // namespace

void launch_prefix_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.results == 0) return;
  launch_exponentials(params, stream);
  with_groups(params.rows, [&]<int kGroups>() {
    launch_panels<kGroups>(&prefix_forward_kernel<kGroups>, params, params, stream);
  });
}

void launch_prefix_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  launch_exponentials(problems, stream);
  if (problems.results > 0) {
    with_groups(problems.rows, [&]<int kGroups>() {
      launch_panels<kGroups>(&prefix_vectors_kernel<kGroups>, problems, params, stream);
      launch_blocks(&prefix_log_domain_kernel<kGroups>,
                    problems.matrices * ((problems.results + kPrefixTile - 1) / kPrefixTile),
                    params, LogDomain<kGroups>::shared_bytes(problems.rows, problems.columns),
                    stream);
    });
  }
  if (problems.rows <= 64) return launch_scores<4>(params, stream);
  launch_scores<8>(params, stream);
}

}  // namespace birkhoff
