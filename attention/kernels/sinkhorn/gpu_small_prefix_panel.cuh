// The scratch memory of the kernels in gpu_small_prefix.cu, and how a block solves a panel of
// prefixes in the ordinary domain in fp32. gpu_prefix.cu has the formulas.
#pragma once

#include <cstddef>

#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/range.h"

namespace birkhoff::small_prefix {
namespace {

// As many threads as a matrix can have prefixes.
constexpr int kThreads = BalanceParams::kMaxBlocks, kWarps = kThreads / kWarp;
constexpr int kTile = BalanceParams::kTile;

// A problem that has left the number range, solved by a block of the same size as all blocks here.
using LogDomain = LogDomainProblem<2, kWarps, false>;

// The scratch memory of a call: for each matrix E, its transpose and the limits of its tiles, and
// for each problem whether it is solved in the log domain.
struct Scratch {
  int width;  // N, padded
  int tiles;
  float *e, *e_t;        // [matrices, width, width], 0 beyond N
  float* limits;         // [matrices, tiles]: the first prefix that is out of range
  float* in_log_domain;  // [matrices, results]: 1 or 0

  __device__ explicit Scratch(const BalanceParams& p)
      : width(BalanceParams::padded(p.rows)),
        tiles(p.num_tiles()),
        e(p.scratch),
        e_t(e + p.matrices * width * width),
        limits(e_t + p.matrices * width * width),
        in_log_domain(limits + p.matrices * tiles) {}
};

// A panel of prefixes, as its block sees it.
struct Panel {
  static constexpr int kPrefixes = 16;

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
  // of a step, transposed; [kWarps, kPrefixes, width + 4], the warps' sums and then, in [0], the
  // step's result. The + 4 avoids bank conflicts.
  __device__ static float* failed() { return reinterpret_cast<float*>(balance_memory); }
  __device__ static float* panel() { return failed() + kPrefixes; }
  __device__ float* sums() const { return panel() + width * kPrefixes; }

  __host__ __device__ static int num_panels(int results) {
    return (results + kPrefixes - 1) / kPrefixes;
  }
  // The log domain uses the memory from panel() on and needs less of it.
  static std::size_t shared_bytes(int size) {
    const int width = BalanceParams::padded(size);
    return sizeof(float) * static_cast<std::size_t>(kPrefixes * (1 + width + kWarps * (width + 4)));
  }

  // Result of the last step for prefix k: [width].
  __device__ float* result(int k) const { return sums() + k * (width + 4); }

  // panel = update(panel factor), where factor is E (kColumnStep, from rows to columns) or its
  // transpose. update(k, j, x) changes elements j .. j + 3 of prefix k, always in the same thread.
  // Elements beyond the prefix become 0. All threads of the block call this; when it returns, they
  // see what `update` wrote.
  template <bool kColumnStep, typename Update>
  __device__ void step(const float* factor, Update update) const {
    constexpr int kRowsMore = kColumnStep ? 1 : 0, kResultsMore = 1 - kRowsMore;
    {
      const int k0 = lane / 16 * 8, c0 = lane % 16 * 4;
      const int last = min(first_prefix + kPrefixes, size) - 1;
      const int depth = last + kRowsMore;
      if (c0 < last + kResultsMore) {
        float sum[8][4] = {};
        const float* factors = panel() + warp * kPrefixes + k0;
        const float* row = factor + warp * width + c0;
        const int row_step = kWarps * width;
#pragma unroll 2
        for (int r = warp; r < depth; r += kWarps) {
          const float4 m = *reinterpret_cast<const float4*>(row);
          const float4 low = *reinterpret_cast<const float4*>(factors);
          const float4 high = *reinterpret_cast<const float4*>(factors + 4);
          row += row_step;
          factors += kWarps * kPrefixes;
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
          *reinterpret_cast<float4*>(sums() + (warp * kPrefixes + k0 + k) * (width + 4) + c0) = {
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
        for (int split = 0; split < kWarps; ++split) {
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

  // Calls use(k, j) for the prefixes k and groups of 4 elements from j on that this thread owns.
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

  // 1 / x where x > 0, else 0. Marks prefix k as failed if x is out of range.
  __device__ float inverse(float x, int k) const {
    if (x == 0) return 0;
    if (!(x > DeviceBalanceRange::kMin && x < 1 / DeviceBalanceRange::kMin)) failed()[k] = 1;
    return 1 / x;
  }

  // Runs all column steps and the row steps between them; each_a(i, k, j, x) and each_b(i, k, j, x)
  // receive a_ui and b_ui. Then runs the last row step, for row u only: one warp per prefix calls
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

}  // namespace
}  // namespace birkhoff::small_prefix
