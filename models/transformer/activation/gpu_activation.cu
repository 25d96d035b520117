// The bias and the activation between the two layers of a feed-forward network, in one pass over
// memory each way. Legend: n row, f column of y, F its width; a = x[n, f] + bias[f], and with gates
// g = x[n, F + f] + bias[F + f].
//
//   relu: y = max(a, 0)    gelu: y = a Phi(a)    geglu: y = a Phi(a) g
//
// Phi and phi are the distribution and the density of N(0, 1). Backward, with y' the derivative by
// a, which for gelu is Phi(a) + a phi(a):
//
//   d_x[n, f] = d_y[n, f] y' (times g)    d_x[n, F + f] = d_y[n, f] a Phi(a)
//   d_bias = the sum of d_x over rows, before d_x is rounded
//
// Forward: a thread owns 16 bytes of a row of y. Backward: a block of 8 warps owns 32 runs of 16
// bytes of a row, of kPartRows rows; each warp adds up every eighth row in registers, and the block
// adds its warps in order. The caller adds the sums of parts. Shared memory: 8 KiB, backward.
// Arithmetic is fp32, results are rounded once. No atomics: the same bits each time.
#include <math.h>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"
#include "models/transformer/activation/gpu_activation_params.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

template <typename T>
constexpr int kCount = 16 / sizeof(T);  // elements that a thread moves at once

// An activation and its derivative at a.
template <ActivationKind kKind>
struct Activated {
  float value, slope;

  __device__ explicit Activated(float a) {
    if constexpr (kKind == ActivationKind::kRelu) {
      // NaN stays, as in LibTorch.
      value = a <= 0 ? 0 : a;
      slope = a <= 0 ? 0 : 1;
    } else {
      constexpr float kSqrtHalf = 0.70710678118654752f, kDensity = 0.3989422804014327f;
      const float below = 0.5f * (1 + erff(a * kSqrtHalf));
      value = a * below;
      slope = below + a * kDensity * expf(-0.5f * a * a);
    }
  }
};

// x + bias of a run of columns.
template <typename T>
__device__ inline void load_sum(const T* x, const float* bias, float (&sum)[kCount<T>]) {
  const auto run = load_vector<T, kCount<T>>(x);
#pragma unroll
  for (int i = 0; i < kCount<T>; ++i) {
    sum[i] = to_float(run.elements[i]) + (bias == nullptr ? 0.0f : bias[i]);
  }
}

template <ActivationKind kKind, typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(const ActivationParams p) {
  constexpr bool kGated = kKind == ActivationKind::kGeglu;
  const std::int64_t runs = p.width / kCount<T>,
                     run = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (run >= p.rows * runs) return;
  const std::int64_t row = run / runs;
  const int f = static_cast<int>(run - row * runs) * kCount<T>;
  const T* x = static_cast<const T*>(p.x) + row * p.width * (kGated ? 2 : 1) + f;
  const float* bias = p.bias == nullptr ? nullptr : p.bias + f;
  float a[kCount<T>], gate[kCount<T>];
  load_sum(x, bias, a);
  if constexpr (kGated) load_sum(x + p.width, bias == nullptr ? bias : bias + p.width, gate);
  Vector<T, kCount<T>> y;
#pragma unroll
  for (int i = 0; i < kCount<T>; ++i) {
    const float value = Activated<kKind>(a[i]).value;
    y.elements[i] = from_float<T>(kGated ? value * gate[i] : value);
  }
  store_vector(static_cast<T*>(p.y) + row * p.width + f, y);
}

// Adds up the sums of the block's warps for each lane's columns, of which `to` is the first; null:
// there are none. All threads call it.
template <typename T>
__device__ inline void store_sums(const float (&sums)[kCount<T>], float* to) {
  __shared__ float of_warps[kWarps][kWarp * 8];
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  __syncthreads();  // earlier sums have been read
#pragma unroll
  for (int i = 0; i < kCount<T>; ++i) of_warps[warp][lane * kCount<T> + i] = sums[i];
  __syncthreads();
  if (warp > 0 || to == nullptr) return;
#pragma unroll
  for (int i = 0; i < kCount<T>; ++i) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][lane * kCount<T> + i];
    to[i] = sum;
  }
}

// Blocks that share a row.
template <typename T>
__host__ __device__ inline unsigned groups_of(const ActivationParams& p) {
  return static_cast<unsigned>((p.width / kCount<T> + kWarp - 1) / kWarp);
}

template <ActivationKind kKind, typename T>
__global__ void __launch_bounds__(kThreads) backward_kernel(const ActivationParams p) {
  constexpr bool kGated = kKind == ActivationKind::kGeglu;
  const int columns = p.width * (kGated ? 2 : 1);
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  const unsigned groups = groups_of<T>(p), part = blockIdx.x / groups;
  const int f = (static_cast<int>(blockIdx.x % groups) * kWarp + lane) * kCount<T>;
  const bool exists = f < p.width;
  const std::int64_t first = part * ActivationParams::kPartRows,
                     end = min(first + ActivationParams::kPartRows, p.rows);
  const float* bias = p.bias == nullptr ? nullptr : p.bias + f;
  float d_a[kCount<T>] = {}, d_gate[kCount<T>] = {};
  for (std::int64_t row = first + warp; exists && row < end; row += kWarps) {
    const T* x = static_cast<const T*>(p.x) + row * columns + f;
    T* d_x = static_cast<T*>(p.d_x) + row * columns + f;
    const auto d_y = load_vector<T, kCount<T>>(static_cast<const T*>(p.d_y) + row * p.width + f);
    float a[kCount<T>], gate[kCount<T>];
    load_sum(x, bias, a);
    if constexpr (kGated) load_sum(x + p.width, bias == nullptr ? bias : bias + p.width, gate);
    Vector<T, kCount<T>> made, made_gate;
#pragma unroll
    for (int i = 0; i < kCount<T>; ++i) {
      const Activated<kKind> activated(a[i]);
      const float d = to_float(d_y.elements[i]),
                  of_a = d * activated.slope * (kGated ? gate[i] : 1.0f);
      made.elements[i] = from_float<T>(of_a);
      d_a[i] += of_a;
      if constexpr (kGated) {
        made_gate.elements[i] = from_float<T>(d * activated.value);
        d_gate[i] += d * activated.value;
      }
    }
    store_vector(d_x, made);
    if constexpr (kGated) store_vector(d_x + p.width, made_gate);
  }
  if (p.partials == nullptr) return;
  float* const to = exists ? p.partials + std::int64_t{part} * columns + f : nullptr;
  store_sums<T>(d_a, to);
  if constexpr (kGated) store_sums<T>(d_gate, exists ? to + p.width : nullptr);
}

// Calls f<kKind, T>().
template <typename Function>
void with_kernel(const ActivationParams& p, Function f) {
  with_element_type(p.dtype, [&]<typename T>() {
    switch (p.kind) {
      case ActivationKind::kRelu:
        return f.template operator()<ActivationKind::kRelu, T>();
      case ActivationKind::kGelu:
        return f.template operator()<ActivationKind::kGelu, T>();
      case ActivationKind::kGeglu:
        return f.template operator()<ActivationKind::kGeglu, T>();
    }
  });
}

}  // namespace

void launch_activation(const ActivationParams& params, cudaStream_t stream) {
  with_kernel(params, [&]<ActivationKind kKind, typename T>() {
    const std::int64_t runs = params.rows * (params.width / kCount<T>);
    launch({.blocks = (runs + kThreads - 1) / kThreads, .threads = kThreads, .stream = stream},
           forward_kernel<kKind, T>, params);
  });
}

void launch_activation_backward(const ActivationParams& params, cudaStream_t stream) {
  with_kernel(params, [&]<ActivationKind kKind, typename T>() {
    launch({.blocks = params.parts() * groups_of<T>(params), .threads = kThreads, .stream = stream},
           backward_kernel<kKind, T>, params);
  });
}

}  // namespace birkhoff
