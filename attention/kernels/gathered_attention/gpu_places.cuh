// Results of rows from those of their places, and what the backward pass needs of rows: kernels of
// gpu_gathered.cu, whose banner has the formulas. For that file only.
#pragma once

#include <math.h>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/gpu_tiles.cuh"
#include "cluster/base/gpu/elements.cuh"

namespace birkhoff {
namespace {

// What a warp owns: a row of a tensor of `heads` heads. A lane has every 32nd column.
struct WarpRow {
  Head head, of_keys;
  int row, lane;
  bool exists;
  std::int64_t number;  // in [B, heads, rows]

  __device__ WarpRow(const GatheredParams& p, int heads, int rows) {
    number = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    lane = static_cast<int>(threadIdx.x % kWarp);
    row = static_cast<int>(number % rows);
    head = {number / rows / heads, number / rows % heads};
    of_keys = key_head(p, head, heads);
    exists = head.b < p.batch;
  }
  template <typename T>
  __device__ T* of(const GatheredRowsParams& x) const {
    return static_cast<T*>(x.data) + head.b * x.strides[0] + head.h * x.strides[1] +
           row * x.strides[2];
  }
};

// One softmax from those of the places.
template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const GatheredParams p) {
  const WarpRow own(p, p.heads, p.queries.rows);
  if (!own.exists) return;
  const HeadLists lists(p.queries, own.of_keys, p.segments);
  const int begin = lists.starts[own.row], end = lists.starts[own.row + 1];
  const std::int64_t first = entry_of(own.head, p.heads, p.queries.places, 0);
  float M = -INFINITY, Z = 0;
#pragma unroll 1
  for (int n = begin; n < end; ++n) {
    const std::int64_t place = first + lists.order[n];
    if (p.place_sum[place] != 0) M = fmaxf(M, p.place_max[place]);
  }
#pragma unroll 1
  for (int n = begin; n < end; ++n) {
    const std::int64_t place = first + lists.order[n];
    if (p.place_sum[place] != 0) Z += p.place_sum[place] * expf(p.place_max[place] - M);
  }
  for (int d = own.lane; d < p.head_dim; d += kWarp) {
    float out = 0;
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
      const std::int64_t place = first + lists.order[n];
      if (p.place_sum[place] == 0) continue;
      out +=
          p.place_sum[place] * expf(p.place_max[place] - M) * p.place_out[place * p.head_dim + d];
    }
    own.of<T>(p.out)[d] = from_float<T>(Z == 0 ? 0.0f : out / Z);
  }
  if (own.lane == 0) {
    p.max[own.number] = Z > 0 ? M : 0.0f;
    p.sum[own.number] = Z;
  }
}

// The mean of the places that see a key.
template <typename T>
__global__ void __launch_bounds__(kThreads) average_kernel(const GatheredParams p) {
  const WarpRow own(p, p.heads, p.queries.rows);
  if (!own.exists) return;
  const HeadLists lists(p.queries, own.of_keys, p.segments);
  const int begin = lists.starts[own.row], end = lists.starts[own.row + 1];
  const std::int64_t first = entry_of(own.head, p.heads, p.queries.places, 0);
  float count = 0;
#pragma unroll 1
  for (int n = begin; n < end; ++n) count += p.place_sum[first + lists.order[n]] != 0 ? 1 : 0;
  for (int d = own.lane; d < p.head_dim; d += kWarp) {
    float sum = 0;  // places that see no key add 0
#pragma unroll 1
    for (int n = begin; n < end; ++n) sum += p.place_out[(first + lists.order[n]) * p.head_dim + d];
    own.of<T>(p.out)[d] = from_float<T>(count == 0 ? 0.0f : sum / count);
  }
  if (own.lane == 0) {
    p.max[own.number] = 0;
    p.sum[own.number] = count;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const GatheredParams p) {
  const WarpRow own(p, p.heads, p.queries.rows);
  if (!own.exists) return;
  const T *d_out = own.of<T>(p.d_out), *out = own.of<T>(p.out);
  float delta = 0;
  for (int d = own.lane; d < p.head_dim; d += kWarp) delta += to_float(d_out[d]) * to_float(out[d]);
  delta = warp_sum(delta);
  if (p.d_sum != nullptr) delta -= p.d_sum[own.number] * p.sum[own.number];
  if (own.lane == 0) {
    p.delta[own.number] = delta;
    p.inverse[own.number] = p.sum[own.number] == 0 ? 0.0f : 1 / p.sum[own.number];
  }
}

// delta of the places of a mean, and what the query adds to the gradient of the sink.
template <typename T>
__global__ void __launch_bounds__(kThreads) mean_delta_kernel(const GatheredParams p) {
  const WarpRow own(p, p.heads, p.queries.rows);
  if (!own.exists) return;
  const HeadLists lists(p.queries, own.of_keys, p.segments);
  const T* d_out = own.of<T>(p.d_out);
  float d_sink = 0;
  for (int n = lists.starts[own.row]; n < lists.starts[own.row + 1]; ++n) {
    const std::int64_t place = entry_of(own.head, p.heads, p.queries.places, lists.order[n]);
    const float* out = p.place_out + place * p.head_dim;
    float delta = 0;
    for (int d = own.lane; d < p.head_dim; d += kWarp) delta += to_float(d_out[d]) * out[d];
    delta = warp_sum(delta);
    const bool sees_keys = p.place_sum[place] != 0;
    const float inverse = sees_keys ? 1 / (p.place_sum[place] * p.sum[own.number]) : 0.0f;
    if (own.lane == 0) {
      p.delta[place] = delta;
      p.inverse[place] = inverse;
    }
    if (p.sink == nullptr || !sees_keys) continue;
    d_sink -= expf(p.sink[own.head.h] - p.place_max[place]) * inverse * delta;
  }
  if (p.sink != nullptr && own.lane == 0) p.d_sink[own.number] = d_sink;
}

// The sums of the places of each row of a tensor of `heads` heads.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const GatheredParams p, const int heads, const GatheredListsParams lists,
               const float* places, const GatheredRowsParams sums) {
  const WarpRow own(p, heads, lists.rows);
  if (!own.exists) return;
  const HeadLists of_head(lists, own.of_keys, p.segments);
  const std::int64_t first = entry_of(own.head, heads, lists.places, 0);
  for (int d = own.lane; d < p.head_dim; d += kWarp) {
    float sum = 0;
    for (int n = of_head.starts[own.row]; n < of_head.starts[own.row + 1]; ++n) {
      sum += places[(first + of_head.order[n]) * p.head_dim + d];
    }
    own.of<T>(sums)[d] = from_float<T>(sum);
  }
}

}  // namespace
}  // namespace birkhoff
