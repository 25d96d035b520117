// Cross entropy and its gradient in one kernel (legend: N rows, V vocabulary):
//
//   z[n]    = log sum over v of exp(x[n, v])
//   nats[n] = z[n] - x[n, t[n]]                                0 where mask[n] is 0
//   x[n, v] <- exp(x[n, v] - z[n]) - (1 - e) [v = t[n]] - e/V  0 where mask[n] is 0
//
// and, with label smoothing e > 0,
//
//   loss[n] = z[n] - sum over v of q[v] x[n, v],  q[v] = (1 - e) [v = t[n]] + e / V
//
// x: [N, V] contiguous fp32, bf16 or fp16, overwritten; t: [N] int64; mask: [N] u8; nats, loss: [N]
// fp32. Arithmetic in fp32. If the target of a row that counts is outside [0, V), both are NaN.
//
// A team of threads owns a row: one warp up to V = 1,024 (four rows per block), else a block of 512
// threads. A thread owns every team-size-th 16-byte vector of its row (single elements if rows are
// not aligned). In the first pass each thread computes a running maximum and a sum of exponentials,
// which are then combined along a fixed tree. The second pass overwrites the row with the gradient
// and, with label smoothing, adds up q[v] (x[n, v] - max), where q are the smoothed targets.
// A block keeps the row in shared memory between the passes if it fits (V elements of type T plus
// 128 bytes; V <= 116,000 in bf16 on sm_90, 83,000 on sm_80); otherwise, and for a warp, the second
// read mostly hits the caches. Memory: one read and one write of x, N V of each. Deterministic.
//
// A second kernel multiplies x by the gradient of the loss, a scalar. It leaves x untouched if the
// scalar is 1, which it always is except with fp16's loss scale.
#include <limits>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"
#include "models/losses/gpu_cross_entropy_params.h"

namespace birkhoff {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kWarpVocabulary = 1024;  // up to here a warp has at most 32 values per lane
constexpr int kRowThreads = 512;                // for larger vocabularies
constexpr int kPartialBytes = 8 * kRowThreads / kWarp;
constexpr int kScaleBlocks = 1024, kScaleThreads = 256;

// The max of some of a row's elements, and the sum of exp(x - max) over them.
struct Partial {
  float max, sum;
};

// The value subtracted from exponents: never -inf, because -inf - -inf is NaN.
__device__ inline float base_of(float max) { return max == -kInfinity ? 0.0f : max; }

__device__ inline Partial merge(Partial a, Partial b) {
  const float max = fmaxf(a.max, b.max);
  const float base = base_of(max);
  return {max, a.sum * expf(a.max - base) + b.sum * expf(b.max - base)};
}

// The partials of all warps of a block, then its row.
extern __shared__ Vector<float, 4> cross_entropy_memory[];

// Merges the partials of all members of a team; every member gets the same bits.
template <int kTeam>
__device__ inline Partial merge_team(Partial p) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    p = merge(p, {__shfl_xor_sync(kWholeWarp, p.max, distance),
                  __shfl_xor_sync(kWholeWarp, p.sum, distance)});
  }
  if constexpr (kTeam > kWarp) {
    auto* warps = reinterpret_cast<Partial*>(cross_entropy_memory);
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = p;
    __syncthreads();
    p = warps[0];
    for (int w = 1; w < kTeam / kWarp; ++w) p = merge(p, warps[w]);
  }
  return p;
}

// The sum over the members of a team; every member gets the same bits.
template <int kTeam>
__device__ inline float sum_of_team(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, distance);
  }
  if constexpr (kTeam > kWarp) {
    auto* warps = reinterpret_cast<float*>(cross_entropy_memory);
    __syncthreads();  // the partials have been read
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < kTeam / kWarp; ++w) x += warps[w];
  }
  return x;
}

template <typename T, int kTeam, int kCount, bool kKept>
__global__ void __launch_bounds__(kTeam == kWarp ? 4 * kWarp : kTeam)
    fused_cross_entropy_kernel(const FusedCrossEntropyParams p) {
  const int row_of_block = static_cast<int>(threadIdx.x) / kTeam;
  const std::int64_t row = std::int64_t{blockIdx.x} * (kTeam == kWarp ? 4 : 1) + row_of_block;
  if (row >= p.rows) return;  // whole warps, or whole blocks if a block is a team
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  // 32-bit numbers of elements: arithmetic, not memory, would limit the kernel.
  const int vocabulary = static_cast<int>(p.vocabulary);
  T* x_V = static_cast<T*>(p.logits) + row * p.vocabulary;
  constexpr int kStride = kTeam * kCount;

  if (p.mask[row] == 0) {
    Vector<T, kCount> zeros;
#pragma unroll
    for (int k = 0; k < kCount; ++k) zeros.elements[k] = from_float<T>(0);
    for (int v = member * kCount; v < vocabulary; v += kStride) {
      store_vector(x_V + v, zeros);
    }
    if (member == 0) p.nats[row] = 0;
    if (member == 0 && p.label_smoothing > 0) p.losses[row] = 0;
    return;
  }

  // Loads several vectors before it uses the first. Four would spill registers in a block that does
  // not keep its row.
  constexpr int kAhead = kKept || kTeam == kWarp ? 4 : 2;
  T* kept_V = reinterpret_cast<T*>(cross_entropy_memory + kPartialBytes / sizeof(Vector<float, 4>));
  Partial partial{-kInfinity, 0};
  for (int first = member * kCount; first < vocabulary; first += kAhead * kStride) {
    Vector<T, kCount> x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int v = first + i * kStride;
      if (v < vocabulary) x[i] = load_vector<T, kCount>(x_V + v);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int v = first + i * kStride;
      if (v >= vocabulary) continue;
      if constexpr (kKept) store_vector(kept_V + v, x[i]);
      float max = partial.max;
#pragma unroll
      for (int k = 0; k < kCount; ++k) max = fmaxf(max, to_float(x[i].elements[k]));
      const float base = base_of(max);
      float sum = partial.sum * expf(partial.max - base);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum += expf(to_float(x[i].elements[k]) - base);
      partial = {max, sum};
    }
  }
  partial = merge_team<kTeam>(partial);

  const std::int64_t target = p.targets[row];
  const bool exists = target >= 0 && target < p.vocabulary;
  if (member == 0 && !exists) p.nats[row] = kNaN;
  const float base = base_of(partial.max), inverse_sum = 1 / partial.sum;
  const float of_each = p.label_smoothing / static_cast<float>(p.vocabulary);
  float expected = 0;  // the sum of this thread's x - base, weighted by the smoothed targets
  for (int v = member * kCount; v < vocabulary; v += kStride) {
    // In kept_V each thread reads only what it stored itself.
    const auto x = load_vector<T, kCount>((kKept ? kept_V : x_V) + v);
    float d[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float of_base = to_float(x.elements[k]) - base;
      d[k] = expf(of_base) * inverse_sum - of_each;
      expected += of_each * of_base;
    }
    if (v <= target && target < v + kCount) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (v + k != target) continue;
        d[k] -= 1 - p.label_smoothing;
        expected += (1 - p.label_smoothing) * (to_float(x.elements[k]) - base);
        p.nats[row] = (base - to_float(x.elements[k])) + logf(partial.sum);
      }
    }
    Vector<T, kCount> gradient;
#pragma unroll
    for (int k = 0; k < kCount; ++k) gradient.elements[k] = from_float<T>(d[k]);
    store_vector(x_V + v, gradient);
  }
  if (p.label_smoothing == 0) return;
  expected = sum_of_team<kTeam>(expected);
  if (member == 0) p.losses[row] = exists ? logf(partial.sum) - expected : kNaN;
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kScaleThreads) scale_kernel(const ScaleParams p) {
  const float factor = *p.factor;
  if (factor == 1) return;
  T* x = static_cast<T*>(p.x);
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kScaleThreads + threadIdx.x) * kCount;
       i < p.count; i += std::int64_t{kScaleBlocks} * kScaleThreads * kCount) {
    auto part = load_vector<T, kCount>(x + i);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      part.elements[k] = from_float<T>(to_float(part.elements[k]) * factor);
    }
    store_vector(x + i, part);
  }
}

template <typename T, int kCount>
void launch_row_blocks(const FusedCrossEntropyParams& p, cudaStream_t stream) {
  const std::size_t kept = kPartialBytes + static_cast<std::size_t>(p.vocabulary) * sizeof(T);
  const bool fits = kept <= most_shared_bytes();
  launch({.blocks = p.rows,
          .threads = kRowThreads,
          .stream = stream,
          .shared_bytes = fits ? kept : kPartialBytes},
         fits ? &fused_cross_entropy_kernel<T, kRowThreads, kCount, true>
              : &fused_cross_entropy_kernel<T, kRowThreads, kCount, false>,
         p);
}

template <typename T, int kCount>
void launch_shaped(const FusedCrossEntropyParams& p, cudaStream_t stream) {
  if (p.vocabulary > kWarpVocabulary) return launch_row_blocks<T, kCount>(p, stream);
  launch({.blocks = (p.rows + 3) / 4, .threads = 4 * kWarp, .stream = stream},
         &fused_cross_entropy_kernel<T, kWarp, kCount, false>, p);
}

}  // namespace

void launch_fused_cross_entropy(const FusedCrossEntropyParams& params, cudaStream_t stream) {
  with_element_type(params.dtype, [&]<typename T>() {
    if (params.vectors) return launch_shaped<T, 16 / sizeof(T)>(params, stream);
    launch_shaped<T, 1>(params, stream);
  });
}

void launch_scale(const ScaleParams& params, cudaStream_t stream) {
  if (params.count == 0) return;
  with_element_type(params.dtype, [&]<typename T>() {
    launch({.blocks = kScaleBlocks, .threads = kScaleThreads, .stream = stream},
           params.vectors ? &scale_kernel<T, 16 / sizeof(T)> : &scale_kernel<T, 1>, params);
  });
}

}  // namespace birkhoff
