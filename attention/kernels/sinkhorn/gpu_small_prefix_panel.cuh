// The scratch memory of the kernels in gpu_small_prefix.cu, and how a block solves a panel of
// prefixes in the ordinary domain in fp32. gpu_prefix.cu has the formulas.
#pragma once

#include <cstddef>

#include "attention/kernels/sinkhorn/gpu_prefixes.cuh"

namespace birkhoff::small_prefix {
namespace {

// For each matrix E and its transpose.
struct Scratch : PrefixScratch {
  int width;       // N, padded
  float *e, *e_t;  // [matrices, width, width], 0 beyond N

  __device__ explicit Scratch(const BalanceParams& p)
      : PrefixScratch(p),
        width(BalanceParams::padded(p.rows)),
        e(p.scratch),
        e_t(e + p.matrices * width * width) {}
};

// A panel of prefixes, as its block sees it.
struct Panel : PrefixPanel<16> {
  using LogDomain = LogDomainProblem<2, kWarps, false>;

  int width;
  const float *e, *e_t;  // of this matrix

  __device__ explicit Panel(const BalanceParams& p) : PrefixPanel(p) {
    const Scratch scratch(p);
    width = scratch.width;
    e = scratch.e + std::int64_t{matrix} * width * width;
    e_t = scratch.e_t + std::int64_t{matrix} * width * width;
  }
  __device__ static Vectors vectors_of(const BalanceBackwardParams& p, std::int64_t matrix,
                                       int result) {
    return {p, matrix * p.problems.results + result};
  }

  // Shared memory: [width, kPrefixes], the left factor of a step, transposed; [kWarps, kPrefixes,
  // width + 4], the warps' sums and then, in [0], the step's result. The + 4 avoids bank conflicts.
  __device__ float* sums() const { return memory() + width * kPrefixes; }
  static std::size_t shared_bytes(int size) {
    const int width = BalanceParams::padded(size);
    return sizeof(float) * static_cast<std::size_t>(kPrefixes * (1 + width + kWarps * (width + 4)));
  }

  // Result of the last step for prefix k: [width].
  __device__ float* result(int k) const { return sums() + k * (width + 4); }

  __device__ float e_at(int u, int c) const { return e[u * width + c]; }
  __device__ float b_at(int k, int c) const { return result(k)[c]; }
  __device__ void set_y(int k, int c, float x, float*) const { result(k)[c] = x; }
  template <typename VectorsOf>
  __device__ void finish_y(VectorsOf vectors, int i) const {
    for_own([&](int k, int j) {
      const float* y = result(k) + j;
      const float four[4] = {y[0], y[1], y[2], y[3]}, zeros[4] = {};
      write(vectors(k).y(i), j, four);
      write(vectors(k).x(i), j, zeros);
      store(k, j, four);
    });
    __syncthreads();
  }

  template <typename EachA>
  __device__ void start(EachA each_a) const {
    for (int j = static_cast<int>(threadIdx.x); j < width * kPrefixes; j += kThreads) {
      memory()[j] = j / kPrefixes <= first_prefix + j % kPrefixes ? 1.0f : 0.0f;
    }
    for_own([&](int k, int j) {
      float ones[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) ones[n] = j + n <= first_prefix + k ? 1.0f : 0.0f;
      each_a(0, k, j, ones);
    });
    __syncthreads();
  }

  // The left factor becomes update(left factor E) or, in a row step, update(left factor E^T).
  // update(k, j, x) changes elements j .. j + 3 of prefix k, always in the same thread. Elements
  // beyond the prefix become 0.
  template <bool kColumnStep, typename Update>
  __device__ void step(Update update) const {
    const float* factor = kColumnStep ? e : e_t;
    constexpr int kRowsMore = kColumnStep ? 1 : 0, kResultsMore = 1 - kRowsMore;
    {
      const int k0 = lane / 16 * 8, c0 = lane % 16 * 4;
      const int last = min(first_prefix + kPrefixes, size) - 1;
      const int depth = last + kRowsMore;
      if (c0 < last + kResultsMore) {
        float sum[8][4] = {};
        const float* factors = memory() + warp * kPrefixes + k0;
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
    for (int n = 0; n < 4; ++n) memory()[(j + n) * kPrefixes + k] = x[n];
  }
};

}  // namespace
}  // namespace birkhoff::small_prefix
