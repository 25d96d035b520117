// Cross entropy and its gradient in one kernel (legend: N rows, V vocabulary):
//
//   z[n]    = log sum over v of exp(x[n, v])
//   loss[n] = z[n] - x[n, t[n]]                       0 where mask[n] is 0
//   x[n, v] <- exp(x[n, v] - z[n]) - [v = t[n]]       0 where mask[n] is 0
//
// x: [N, V] contiguous fp32, bf16 or fp16, overwritten; t: [N] int64; mask: [N] u8; loss: [N] fp32.
// Arithmetic in fp32. A target outside [0, V) of a row that counts gives the loss NaN.
//
// A team of threads owns a row: one warp up to V = 1,024 (four rows a block), else a block of 512
// threads. A thread owns every team-size-th vector of 16 bytes of its row (elements where rows are
// not aligned). First pass: running maximum and sum of exponentials, each thread its own, then
// combined along a fixed tree. Second pass: the row is read again, which the L2 cache mostly
// answers, and the gradient is written over it. Memory: one read and one write of x, N V of each.
// Shared memory: 128 bytes. Deterministic.
#include <limits>

#include "cluster/base/cuda/elements.cuh"
#include "cluster/base/cuda/launch.h"
#include "models/fused_cross_entropy_params.h"

namespace birkhoff {
namespace {

constexpr unsigned kWholeWarp = 0xffffffff;
constexpr int kWarp = 32;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kWarpVocabulary = 1024;  // up to here a warp has at most 32 values a lane
constexpr int kRowThreads = 512;                // beyond

// max and sum of exp(x - max) of some of a row's elements.
struct Partial {
  float max, sum;
};

// What exponents are taken relative to: no -inf, because -inf - -inf is not a number.
__device__ inline float base_of(float max) { return max == -kInfinity ? 0.0f : max; }

__device__ inline Partial merge(Partial a, Partial b) {
  const float max = fmaxf(a.max, b.max);
  const float base = base_of(max);
  return {max, a.sum * expf(a.max - base) + b.sum * expf(b.max - base)};
}

// The partial of all lanes of a warp, the same bits in each.
__device__ inline Partial merge_warp(Partial p) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    p = merge(p, {__shfl_down_sync(kWholeWarp, p.max, distance),
                  __shfl_down_sync(kWholeWarp, p.sum, distance)});
  }
  return {__shfl_sync(kWholeWarp, p.max, 0), __shfl_sync(kWholeWarp, p.sum, 0)};
}

template <int kTeam>
__device__ inline Partial merge_team(Partial p) {
  p = merge_warp(p);
  if constexpr (kTeam > kWarp) {
    __shared__ Partial warps[kTeam / kWarp];
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = p;
    __syncthreads();
    p = warps[0];
    for (int w = 1; w < kTeam / kWarp; ++w) p = merge(p, warps[w]);
  }
  return p;
}

template <typename T, int kTeam, int kCount>
__global__ void __launch_bounds__(kTeam == kWarp ? 4 * kWarp : kTeam)
    fused_cross_entropy_kernel(const FusedCrossEntropyParams p) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kTeam;
  if (row >= p.rows) return;  // whole warps, and whole blocks where a block is a team
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  T* x_V = static_cast<T*>(p.logits) + row * p.vocabulary;
  constexpr std::int64_t kStride = std::int64_t{kTeam} * kCount;

  if (p.mask[row] == 0) {
    Vector<T, kCount> zeros;
#pragma unroll
    for (int k = 0; k < kCount; ++k) zeros.elements[k] = from_float<T>(0);
    for (std::int64_t v = member * kCount; v < p.vocabulary; v += kStride) {
      store_vector(x_V + v, zeros);
    }
    if (member == 0) p.losses[row] = 0;
    return;
  }

  Partial partial{-kInfinity, 0};
  for (std::int64_t v = member * kCount; v < p.vocabulary; v += kStride) {
    const auto x = load_vector<T, kCount>(x_V + v);
    float max = partial.max;
#pragma unroll
    for (int k = 0; k < kCount; ++k) max = fmaxf(max, to_float(x.elements[k]));
    const float base = base_of(max);
    float sum = partial.sum * expf(partial.max - base);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum += expf(to_float(x.elements[k]) - base);
    partial = {max, sum};
  }
  partial = merge_team<kTeam>(partial);

  const std::int64_t target = p.targets[row];
  if (member == 0 && (target < 0 || target >= p.vocabulary)) {
    p.losses[row] = kNaN;
  }
  const float base = base_of(partial.max), inverse_sum = 1 / partial.sum;
  for (std::int64_t v = member * kCount; v < p.vocabulary; v += kStride) {
    const auto x = load_vector<T, kCount>(x_V + v);
    Vector<T, kCount> gradient;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float logit = to_float(x.elements[k]);
      float d = expf(logit - base) * inverse_sum;
      if (v + k == target) {
        d -= 1;
        p.losses[row] = (base - logit) + logf(partial.sum);
      }
      gradient.elements[k] = from_float<T>(d);
    }
    store_vector(x_V + v, gradient);
  }
}

template <typename T, int kTeam, int kCount>
void launch_shaped(const FusedCrossEntropyParams& p, cudaStream_t stream) {
  constexpr int kThreads = kTeam == kWarp ? 4 * kWarp : kTeam;
  constexpr std::int64_t kRowsOfBlock = kThreads / kTeam;
  const auto blocks = static_cast<unsigned>((p.rows + kRowsOfBlock - 1) / kRowsOfBlock);
  launch({.grid = dim3(blocks), .block = dim3(kThreads), .stream = stream},
         fused_cross_entropy_kernel<T, kTeam, kCount>, p);
}

template <typename T>
void launch_typed(const FusedCrossEntropyParams& p, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(T);
  const bool warp = p.vocabulary <= kWarpVocabulary;
  if (warp && p.vectors) return launch_shaped<T, kWarp, kCount>(p, stream);
  if (warp) return launch_shaped<T, kWarp, 1>(p, stream);
  if (p.vectors) return launch_shaped<T, kRowThreads, kCount>(p, stream);
  launch_shaped<T, kRowThreads, 1>(p, stream);
}

}  // namespace

void launch_fused_cross_entropy(const FusedCrossEntropyParams& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  switch (params.dtype) {
    case KernelDtype::kFloat:
      return launch_typed<float>(params, stream);
    case KernelDtype::kBFloat16:
      return launch_typed<__nv_bfloat16>(params, stream);
    case KernelDtype::kHalf:
      return launch_typed<__half>(params, stream);
    case KernelDtype::kDouble:
    case KernelDtype::kLong:
      break;  // the caller takes the reference
  }
  cuda_check(cudaErrorInvalidValue, "launch_fused_cross_entropy");
}

}  // namespace birkhoff
