// Block pooling (block_pool.h). Legend: n block, t token of a block, c channel.
//
//   sum_nc = sum over t with mask_nt of x_(n b + t)c,  e_0 = 0,  e_(n+1) = keeps_n e_n + sum_n,
//   psi_n = sum_n / divisor_n, or cumulative (opens_n e_n + first_exists_n x_(n b)) / divisor_n,
//
// and backward, with g_n = d_psi_n / divisor_n:
//
//   e'_N = 0,  e'_n = keeps_n e'_(n+1) + opens_n g_n,
//   d_x_(n b + t) = mask_nt g_n, or cumulative mask_nt e'_(n+1) + [t = 0] first_exists_n g_n.
//
// A thread of sums_kernel and gradients_kernel owns 16 bytes of adjacent channels of one block (one
// channel where rows are not aligned). A thread of forward_scan_kernel and backward_scan_kernel
// owns one channel of one sequence. Threads load kAtOnce tokens or blocks at a time, to keep loads
// in flight, and add in their order, in fp32: no atomics, the same bits each time. Memory traffic:
// x once and psi three times, or d_x once and psi three times.
#include "attention/kernels/block_pool/gpu_params.h"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 128, kAtOnce = 8;

__device__ inline std::int64_t thread_number() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

// A block of a sequence, in [batch, blocks].
struct PooledBlock {
  std::int64_t b, n;
};

__device__ inline bool is_linked(const BlockPoolParams& p, PooledBlock at, std::uint8_t bit) {
  return p.links == nullptr || (p.links[at.b * p.blocks + at.n] & bit) != 0;
}
__device__ inline float divisor_of(const BlockPoolParams& p, PooledBlock at) {
  return p.divisor == nullptr ? 1.0f : p.divisor[at.b * p.blocks + at.n];
}
// Whether token t of a block exists and is added up.
__device__ inline bool is_added(const BlockPoolParams& p, PooledBlock at, std::int64_t t) {
  return t < p.block && at.n * p.block + t < p.tokens &&
         (p.mask == nullptr || p.mask[(at.b * p.blocks + at.n) * p.block + t]);
}

// The block and the channels, from c on, that a thread of sums_kernel or gradients_kernel owns.
// Returns false if it owns nothing.
template <int kCount>
__device__ inline bool own_channels(const BlockPoolParams& p, PooledBlock& at, std::int64_t& c) {
  const std::int64_t groups = p.channels / kCount, number = thread_number();
  c = number % groups * kCount;
  at = {number / groups / p.blocks, number / groups % p.blocks};
  return at.b < p.batch;
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) sums_kernel(const BlockPoolParams p) {
  PooledBlock at;
  std::int64_t c;
  if (!own_channels<kCount>(p, at, c)) return;
  const T* x =
      static_cast<const T*>(p.x) + at.b * p.x_strides[0] + at.n * p.block * p.x_strides[1] + c;
  float sum[kCount] = {};
  for (std::int64_t first = 0; first < p.block; first += kAtOnce) {
    Vector<T, kCount> loaded[kAtOnce];
    bool added[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      added[i] = is_added(p, at, first + i);
      if (added[i]) loaded[i] = load_vector<T, kCount>(x + (first + i) * p.x_strides[1]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (added[i]) sum[k] += to_float(loaded[i].elements[k]);
      }
    }
  }
  const float divisor = p.cumulative ? 1.0f : divisor_of(p, at);
  float* psi = p.psi + (at.b * p.blocks + at.n) * p.channels + c;
  constexpr int kStored = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int first = 0; first < kCount; first += kStored) {
    Vector<float, kStored> stored;
#pragma unroll
    for (int k = 0; k < kStored; ++k) stored.elements[k] = sum[first + k] / divisor;
    store_vector(psi + first, stored);
  }
}

// Turns the sums in psi into features.
template <typename T>
__global__ void __launch_bounds__(kThreads) forward_scan_kernel(const BlockPoolParams p) {
  const std::int64_t number = thread_number(), b = number / p.channels, c = number % p.channels;
  if (b >= p.batch) return;
  const T* x = static_cast<const T*>(p.x) + b * p.x_strides[0] + c;
  float* psi = p.psi + b * p.blocks * p.channels + c;
  float so_far = 0;
  for (std::int64_t begin = 0; begin < p.blocks; begin += kAtOnce) {
    float sums[kAtOnce], firsts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t n = begin + i;
      sums[i] = n < p.blocks ? psi[n * p.channels] : 0.0f;
      firsts[i] = n < p.blocks && is_linked(p, {b, n}, kFirstExists)
                      ? to_float(x[n * p.block * p.x_strides[1]])
                      : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t n = begin + i;
      if (n >= p.blocks) break;
      psi[n * p.channels] =
          ((is_linked(p, {b, n}, kOpens) ? so_far : 0.0f) + firsts[i]) / divisor_of(p, {b, n});
      so_far = (is_linked(p, {b, n}, kKeeps) ? so_far : 0.0f) + sums[i];
    }
  }
}

// later_n = e'_(n+1).
__global__ void __launch_bounds__(kThreads) backward_scan_kernel(const BlockPoolParams p) {
  const std::int64_t number = thread_number(), b = number / p.channels, c = number % p.channels;
  if (b >= p.batch) return;
  const float* d_psi = p.d_psi + b * p.blocks * p.channels + c;
  float* later = p.later + b * p.blocks * p.channels + c;
  float so_far = 0;
  for (std::int64_t end = p.blocks; end > 0; end -= kAtOnce) {
    float d[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t n = end - 1 - i;
      d[i] = n >= 0 ? d_psi[n * p.channels] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t n = end - 1 - i;
      if (n < 0) break;
      later[n * p.channels] = so_far;
      so_far = (is_linked(p, {b, n}, kKeeps) ? so_far : 0.0f) +
               (is_linked(p, {b, n}, kOpens) ? d[i] / divisor_of(p, {b, n}) : 0.0f);
    }
  }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) gradients_kernel(const BlockPoolParams p) {
  PooledBlock at;
  std::int64_t c;
  if (!own_channels<kCount>(p, at, c)) return;
  const std::int64_t place = (at.b * p.blocks + at.n) * p.channels + c;
  const float divisor = divisor_of(p, at);
  const bool adds_first = p.cumulative && is_linked(p, at, kFirstExists);
  float d_sum[kCount], d_first[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float d = p.d_psi[place + k] / divisor;
    d_sum[k] = p.cumulative ? p.later[place + k] : d;
    d_first[k] = adds_first ? d : 0.0f;
  }
  T* d_x = static_cast<T*>(p.d_x) + (at.b * p.tokens + at.n * p.block) * p.channels + c;
  for (std::int64_t t = 0; t < p.block && at.n * p.block + t < p.tokens; ++t) {
    const bool added = is_added(p, at, t);
    Vector<T, kCount> d;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      d.elements[k] = from_float<T>((added ? d_sum[k] : 0.0f) + (t == 0 ? d_first[k] : 0.0f));
    }
    store_vector(d_x + t * p.channels, d);
  }
}

void launch_threads(void (*kernel)(BlockPoolParams), std::int64_t count,
                    const BlockPoolParams& params, cudaStream_t stream) {
  launch({.blocks = (count + kThreads - 1) / kThreads, .threads = kThreads, .stream = stream},
         kernel, params);
}

template <typename T, int kCount>
void launch_forward(const BlockPoolParams& p, cudaStream_t stream) {
  launch_threads(&sums_kernel<T, kCount>, p.batch * p.blocks * (p.channels / kCount), p, stream);
  if (p.cumulative) launch_threads(&forward_scan_kernel<T>, p.batch * p.channels, p, stream);
}

template <typename T, int kCount>
void launch_backward(const BlockPoolParams& p, cudaStream_t stream) {
  if (p.cumulative) launch_threads(&backward_scan_kernel, p.batch * p.channels, p, stream);
  launch_threads(&gradients_kernel<T, kCount>, p.batch * p.blocks * (p.channels / kCount), p,
                 stream);
}

// Calls f<T, kCount>().
template <typename Function>
void with_elements(const BlockPoolParams& p, Function f) {
  with_element_type(p.dtype, [&]<typename T>() {
    if (p.vectors) return f.template operator()<T, static_cast<int>(16 / sizeof(T))>();
    f.template operator()<T, 1>();
  });
}

}  // namespace

void launch_block_pool(const BlockPoolParams& params, cudaStream_t stream) {
  with_elements(params,
                [&]<typename T, int kCount>() { launch_forward<T, kCount>(params, stream); });
}

void launch_block_pool_backward(const BlockPoolParams& params, cudaStream_t stream) {
  with_elements(params,
                [&]<typename T, int kCount>() { launch_backward<T, kCount>(params, stream); });
}

}  // namespace birkhoff
