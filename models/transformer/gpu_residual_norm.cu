// Residual addition and layer norm in one kernel, and their gradient (Ba et al. 2016). Legend: n
// row of N, c channel of C; all sums are over c unless stated otherwise.
//
//   s[n, c] = x[n, c] + y[n, c], or x[n, c] without y
//   mu[n]   = sum s[n, c] / C      r[n] = 1 / sqrt(sum (s[n, c] - mu[n])^2 / C + epsilon)
//   mu's own rounding would dominate the error of h, so the second sum corrects it: with a first
//   mean m, mu = m + e and the variance is sum (s - m)^2 / C - e^2, where e = sum (s - m) / C
//   o[n, c] = (s[n, c] - mu[n]) r[n] w[c] + b[c]
//
// Backward, with h[n, c] = (s[n, c] - mu[n]) r[n] and g[n, c] = do[n, c] w[c]:
//
//   dx[n, c] = ds[n, c] + r[n] (g[n, c] - sum g[n, .] / C - h[n, c] sum (g h)[n, .] / C)
//   dy[n, c] = dx[n, c]
//   dw[c]    = sum over n of do[n, c] h[n, c]              db[c] = sum over n of do[n, c]
//
// Residual stream x, s, ds, dx: [N, C], contiguous, fp32. Output y of the previous branch, input o
// of the next, and their gradients dy, do: [N, C], fp32, bf16 or fp16, rounded once. w, b, dw, db:
// [C], and mu, r: [N], all fp32. Arithmetic in fp32.
//
// A block of 32, 128 or 256 threads processes one row at a time. A thread owns G groups of 4
// adjacent channels and keeps them in registers, so each tensor is read or written once. Forward:
// one block per row. Backward: block k of K = parts(N, C) processes rows kN/K .. (k+1)N/K, adds up
// dw and db in registers, in row order, and writes them to partials[k]. A final kernel adds the
// partials in fp64: for each element of dw and db, thread j of 16 adds those of k = j, j + 16, ..,
// then the sums of the threads are added in order of j. Shared memory: at most 4 KiB. No atomics:
// deterministic, the same bits on every device.
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"
#include "models/transformer/gpu_residual_norm_params.h"

namespace birkhoff {
namespace {

constexpr int kCount = 4;  // adjacent channels: 16 bytes in fp32, 8 in the other types
// Of the final kernel: elements of dw and db that a block owns, and threads of each.
constexpr int kSumColumns = 32, kSumThreads = 16;

// The sums of a and b over the block; all threads get the same bits. All threads of the block must
// call it.
template <int kThreads>
__device__ inline float2 block_sums(float a, float b) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    a += __shfl_xor_sync(kWholeWarp, a, distance);
    b += __shfl_xor_sync(kWholeWarp, b, distance);
  }
  if constexpr (kThreads > kWarp) {
    __shared__ float2 warps[kThreads / kWarp];
    __syncthreads();  // all threads have read the previous sums
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = make_float2(a, b);
    __syncthreads();
    a = b = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) {
      a += warps[w].x;
      b += warps[w].y;
    }
  }
  return make_float2(a, b);
}

// The first channel of this thread's group g.
template <int kThreads>
__device__ inline int channel_of(int g) {
  return (g * kThreads + static_cast<int>(threadIdx.x)) * kCount;
}

template <typename Branch, int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads) forward_kernel(const ResidualNormParams p) {
  const std::int64_t row = blockIdx.x;
  const int channels = static_cast<int>(p.channels);
  const float* x_C = p.x + row * channels;
  Branch* normed_C = static_cast<Branch*>(p.normed) + row * channels;

  float s[kGroups][kCount];
  float total = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = channel_of<kThreads>(g);
    if (c >= channels) continue;
    auto sum = load_vector<float, kCount>(x_C + c);
    if (p.y != nullptr) {
      const auto y =
          load_vector<Branch, kCount>(static_cast<const Branch*>(p.y) + row * channels + c);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum.elements[k] += to_float(y.elements[k]);
      store_vector(p.sum + row * channels + c, sum);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      s[g][k] = sum.elements[k];
      total += s[g][k];
    }
  }
  const float first_mean = block_sums<kThreads>(total, 0).x / p.channels;
  float squares = 0, deviations = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (channel_of<kThreads>(g) >= channels) continue;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      squares += (s[g][k] - first_mean) * (s[g][k] - first_mean);
      deviations += s[g][k] - first_mean;
    }
  }
  const float2 sums = block_sums<kThreads>(squares, deviations);
  const float correction = sums.y / p.channels, mean = first_mean + correction;
  const float variance = fmaxf(sums.x / p.channels - correction * correction, 0);
  const float rstd = 1 / sqrtf(variance + p.epsilon);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = channel_of<kThreads>(g);
    if (c >= channels) continue;
    const auto weight = load_vector<float, kCount>(p.weight + c);
    Vector<float, kCount> bias{};
    if (p.bias != nullptr) bias = load_vector<float, kCount>(p.bias + c);
    Vector<Branch, kCount> normed;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float h = (s[g][k] - mean) * rstd;
      normed.elements[k] = from_float<Branch>(h * weight.elements[k] + bias.elements[k]);
    }
    store_vector(normed_C + c, normed);
  }
  if (threadIdx.x == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
}

template <typename Branch, int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads) backward_kernel(const ResidualNormBackwardParams p) {
  const int channels = static_cast<int>(p.channels);
  const std::int64_t first_row = blockIdx.x * p.rows / gridDim.x;
  const std::int64_t last_row = (blockIdx.x + std::int64_t{1}) * p.rows / gridDim.x;

  float d_weight[kGroups][kCount] = {}, d_bias[kGroups][kCount] = {};
  for (std::int64_t row = first_row; row < last_row; ++row) {
    const Branch* d_normed_C = static_cast<const Branch*>(p.d_normed) + row * channels;
    const float* d_sum_C = p.d_sum + row * channels;
    const float* sum_C = p.sum + row * channels;
    float* d_x_C = p.d_x + row * channels;
    const float mean = p.mean[row], rstd = p.rstd[row];

    float h[kGroups][kCount], gradient[kGroups][kCount];
    Vector<float, kCount> d_sum[kGroups];  // loaded while the block adds up
    float sum_g = 0, sum_gh = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int c = channel_of<kThreads>(g);
      if (c >= channels) continue;
      const auto d_normed = load_vector<Branch, kCount>(d_normed_C + c);
      const auto s = load_vector<float, kCount>(sum_C + c);
      const auto weight = load_vector<float, kCount>(p.weight + c);
      d_sum[g] = load_vector<float, kCount>(d_sum_C + c);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float d = to_float(d_normed.elements[k]);
        h[g][k] = (s.elements[k] - mean) * rstd;
        gradient[g][k] = d * weight.elements[k];
        d_weight[g][k] += d * h[g][k];
        d_bias[g][k] += d;
        sum_g += gradient[g][k];
        sum_gh += gradient[g][k] * h[g][k];
      }
    }
    const float2 sums = block_sums<kThreads>(sum_g, sum_gh);
    const float mean_g = sums.x / channels, mean_gh = sums.y / channels;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int c = channel_of<kThreads>(g);
      if (c >= channels) continue;
      Vector<float, kCount> d_x;
      Vector<Branch, kCount> d_y;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        d_x.elements[k] =
            d_sum[g].elements[k] + rstd * (gradient[g][k] - mean_g - h[g][k] * mean_gh);
        d_y.elements[k] = from_float<Branch>(d_x.elements[k]);
      }
      store_vector(d_x_C + c, d_x);
      if (p.d_y != nullptr) store_vector(static_cast<Branch*>(p.d_y) + row * channels + c, d_y);
    }
  }

  float* partial_2C = p.partials + std::int64_t{blockIdx.x} * 2 * channels;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = channel_of<kThreads>(g);
    if (c >= channels) continue;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      partial_2C[c + k] = d_weight[g][k];
      partial_2C[channels + c + k] = d_bias[g][k];
    }
  }
}

__global__ void __launch_bounds__(kSumColumns* kSumThreads)
    sum_partials_kernel(const float* partials_K2C, int parts, int channels, float* d_weight_C,
                        float* d_bias_C) {
  __shared__ double sums[kSumThreads][kSumColumns];
  const int place = static_cast<int>(threadIdx.x) % kSumColumns;
  const int j = static_cast<int>(threadIdx.x) / kSumColumns;
  const int column = static_cast<int>(blockIdx.x) * kSumColumns + place;
  double sum = 0;
  if (column < 2 * channels) {
#pragma unroll 8
    for (int k = j; k < parts; k += kSumThreads) {
      sum += partials_K2C[std::int64_t{k} * 2 * channels + column];
    }
  }
  sums[j][place] = sum;
  __syncthreads();
  float* out = column < channels ? d_weight_C : d_bias_C;
  if (j > 0 || column >= 2 * channels || out == nullptr) return;
  for (int other = 1; other < kSumThreads; ++other) sum += sums[other][place];
  out[column % channels] = static_cast<float>(sum);
}

// Calls f with two template arguments: the threads of a block, and the groups of 4 channels per
// thread.
template <typename Function>
void with_shape(std::int64_t channels, Function f) {
  switch (ResidualNormBackwardParams::threads(channels)) {
    case 32:
      return f.template operator()<32, 1>();
    case 128:
      return f.template operator()<128, 1>();
    default:
      break;
  }
  if (channels <= 1024) return f.template operator()<256, 1>();
  if (channels <= 2048) return f.template operator()<256, 2>();
  if (channels <= 4096) return f.template operator()<256, 4>();
  f.template operator()<256, 8>();
}

}  // namespace

void launch_residual_norm(const ResidualNormParams& params, cudaStream_t stream) {
  with_element_type(params.branch_dtype, [&]<typename Branch>() {
    with_shape(params.channels, [&]<int kThreads, int kGroups>() {
      launch({.blocks = params.rows, .threads = kThreads, .stream = stream},
             forward_kernel<Branch, kThreads, kGroups>, params);
    });
  });
}

void launch_residual_norm_backward(const ResidualNormBackwardParams& params, cudaStream_t stream) {
  const std::int64_t parts = ResidualNormBackwardParams::parts(params.rows, params.channels);
  with_element_type(params.branch_dtype, [&]<typename Branch>() {
    with_shape(params.channels, [&]<int kThreads, int kGroups>() {
      launch({.blocks = parts, .threads = kThreads, .stream = stream},
             backward_kernel<Branch, kThreads, kGroups>, params);
    });
  });
  launch({.blocks = (2 * params.channels + kSumColumns - 1) / kSumColumns,
          .threads = kSumColumns * kSumThreads,
          .stream = stream},
         sum_partials_kernel, params.partials, static_cast<int>(parts),
         static_cast<int>(params.channels), params.d_weight, params.d_bias);
}

}  // namespace birkhoff
