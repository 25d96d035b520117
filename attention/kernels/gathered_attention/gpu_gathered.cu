// Attention over gathered rows (gathered_attention.h). Legend: i place of a query, j place of a key
// in the same segment that i sees, r(i) the row at a place, d of D.
//
//   s_ij = scale sum_d q_r(i)d k_r(j)d,  m_i = max_j s_ij,  l_i = sum_j exp(s_ij - m_i),
//   o_id = sum_j exp(s_ij - m_i) v_r(j)d / l_i
//
// and of each row r, over its places i, in ascending order (the inverse list):
//
//   M_r = max_i m_i,  Z_r = sum_i l_i exp(m_i - M_r),
//   out_rd = sum_i l_i exp(m_i - M_r) o_id / Z_r
//
// Backward, with r = r(i), p_ij = exp(s_ij - M_r) / Z_r:
//
//   delta_r = sum_d d_out_rd out_rd - d_Z_r Z_r,
//   ds_ij = p_ij (sum_d d_out_rd v_r(j)d - delta_r),
//   d_q_id = scale sum_j ds_ij k_r(j)d,  d_k_jd = scale sum_i ds_ij q_r(i)d,
//   d_v_jd = sum_i p_ij d_out_r(i)d,
//
// and the gradient of a row is the sum over its places. fp32 throughout; results are rounded once.
//
// forward, query_gradients: a block of 256 threads owns kTile successive places of queries of a
//   head, which may be in several segments, and reads the keys of these segments in tiles of kTile.
// key_gradients: the same with queries and keys exchanged.
//   Eight threads own a place: of each kTile x kTile product a thread has kTile / 8 numbers, of D
//   columns every eighth. Shared memory: two (forward) or four tiles of rows and one or two of
//   products, 13 KiB (D = 32) to 137 KiB (D = 256).
// merge, delta, add: a warp owns a row, a lane every 32nd column.
//
// Results belong to places and then to rows: no atomics, fixed orders, the same bits each time.
#include <math.h>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/gpu_tiles.cuh"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

namespace {

std::size_t shared_bytes(int head_dim, int row_tiles, int product_tiles) {
  return sizeof(float) * kTile *
         static_cast<std::size_t>(row_tiles * (head_dim + 1) + product_tiles * (kTile + 1));
}

// The logit of a query and a key. Rounded before anything is subtracted from it, so that both passes
// have the same bits.
__device__ inline float logit(const float* q, const float* k, const GatheredParams& p) {
  return __fmul_rn(product(q, k, p.head_dim), p.scale);
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, kBlocks) forward_kernel(const GatheredParams p) {
  const Tile tile(p, p.queries);
  if (tile.first >= tile.end) return;
  const HeadLists queries(p.queries, tile.head, p.segments), keys(p.keys, tile.head, p.segments);
  const int D = p.head_dim;
  const Memory memory(D);
  const RowTile q = memory.rows(0), k_or_v = memory.rows(1);
  float* const weights = memory.products(2, 0) + tile.local * (kTile + 1);
  q.load<T>(p.q, queries, tile.first, tile.end, D);
  float m = -INFINITY, l = 0, o[kColumns / kTeam] = {};
  for (int g = queries.segment_of(tile.first, p.segments);
       g < p.segments && queries.first_of(g) < tile.end; ++g) {
    if (queries.first_of(g) == queries.ends[g]) continue;  // no query of the tile
    const bool is_member = tile.place >= queries.first_of(g) && tile.place < queries.ends[g];
    for (int first = keys.first_of(g); first < keys.ends[g]; first += kTile) {
      __syncthreads();
      k_or_v.load<T>(p.k, keys, first, keys.ends[g], D);
      __syncthreads();
      float s[kPairs], tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int j = tile.member + n * kTeam;
        const bool visible = is_member && first + j < keys.ends[g] &&
                             sees(p, queries, tile.place, keys, first + j, g);
        s[n] = visible ? logit(q.row(tile.local), k_or_v.row(j), p) : -INFINITY;
        tile_max = fmaxf(tile_max, s[n]);
      }
      const float new_m = fmaxf(m, team_max(tile_max));
      const float shift = new_m == -INFINITY ? 0.0f : new_m;
      const float factor = expf(m - shift);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const float weight = expf(s[n] - shift);
        weights[tile.member + n * kTeam] = weight;
        sum += weight;
      }
      m = new_m;
      l = l * factor + team_sum(sum);
      __syncthreads();
      k_or_v.load<T>(p.v, keys, first, keys.ends[g], D);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns / kTeam; ++c) {
        const int d = tile.member + c * kTeam;
        if (d >= D) break;
        o[c] = o[c] * factor + weighted_sum(weights, k_or_v, d);
      }
    }
  }
  if (tile.place >= tile.end) return;
  const std::int64_t entry = tile.entry(p, p.queries);
#pragma unroll
  for (int c = 0; c < kColumns / kTeam; ++c) {
    const int d = tile.member + c * kTeam;
    if (d < D) p.place_out[entry * D + d] = l == 0 ? 0.0f : o[c] / l;
  }
  if (tile.member == 0) {
    p.place_max[entry] = l > 0 ? m : 0.0f;
    p.place_sum[entry] = l;
  }
}

// p_ij and ds_ij of a query and a key, whose rows lie in shared memory; M, 1 / Z and delta are
// those of the query.
struct Gradient {
  float p, ds;
  __device__ Gradient(const float* q, const float* k, const float* d_out, const float* v, float M,
                      float inverse_Z, float delta, const GatheredParams& params) {
    p = expf(logit(q, k, params) - M) * inverse_Z;
    ds = p * (product(d_out, v, params.head_dim) - delta);
  }
};

// M, 1 / Z and delta of the query at a place.
struct QueryStatistics {
  float M, inverse_Z, delta;
  __device__ QueryStatistics(const GatheredParams& p, const HeadLists& queries, int place) {
    const std::int64_t row =
        (queries.head.b * p.heads + queries.head.h) * p.queries.rows + queries.row(place);
    M = p.max[row];
    inverse_Z = p.sum[row] == 0 ? 0.0f : 1 / p.sum[row];
    delta = p.delta[row];
  }
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, kBlocks)
    query_gradients_kernel(const GatheredParams p) {
  const Tile tile(p, p.queries);
  if (tile.first >= tile.end) return;
  const HeadLists queries(p.queries, tile.head, p.segments), keys(p.keys, tile.head, p.segments);
  const int D = p.head_dim;
  const Memory memory(D);
  const RowTile q = memory.rows(0), d_out = memory.rows(1), k = memory.rows(2), v = memory.rows(3);
  float* const weights = memory.products(4, 0) + tile.local * (kTile + 1);
  q.load<T>(p.q, queries, tile.first, tile.end, D);
  d_out.load<T>(p.d_out, queries, tile.first, tile.end, D);
  const QueryStatistics own(p, queries, min(tile.place, tile.end - 1));
  float d_q[kColumns / kTeam] = {};
  for (int g = queries.segment_of(tile.first, p.segments);
       g < p.segments && queries.first_of(g) < tile.end; ++g) {
    if (queries.first_of(g) == queries.ends[g]) continue;  // no query of the tile
    const bool is_member = tile.place >= queries.first_of(g) && tile.place < queries.ends[g];
    for (int first = keys.first_of(g); first < keys.ends[g]; first += kTile) {
      __syncthreads();
      k.load<T>(p.k, keys, first, keys.ends[g], D);
      v.load<T>(p.v, keys, first, keys.ends[g], D);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int j = tile.member + n * kTeam;
        const bool visible = is_member && first + j < keys.ends[g] &&
                             sees(p, queries, tile.place, keys, first + j, g);
        weights[j] = visible ? Gradient(q.row(tile.local), k.row(j), d_out.row(tile.local),
                                        v.row(j), own.M, own.inverse_Z, own.delta, p)
                                   .ds
                             : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns / kTeam; ++c) {
        const int d = tile.member + c * kTeam;
        if (d >= D) break;
        d_q[c] += weighted_sum(weights, k, d);
      }
    }
  }
  if (tile.place >= tile.end) return;
#pragma unroll
  for (int c = 0; c < kColumns / kTeam; ++c) {
    const int d = tile.member + c * kTeam;
    if (d < D) p.d_q_places[tile.entry(p, p.queries) * D + d] = d_q[c] * p.scale;
  }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, kBlocks) key_gradients_kernel(const GatheredParams p) {
  const Tile tile(p, p.keys);
  if (tile.first >= tile.end) return;
  const HeadLists queries(p.queries, tile.head, p.segments), keys(p.keys, tile.head, p.segments);
  const int D = p.head_dim;
  const Memory memory(D);
  const RowTile k = memory.rows(0), v = memory.rows(1), q = memory.rows(2), d_out = memory.rows(3);
  float* const weights = memory.products(4, 0) + tile.local * (kTile + 1);    // p
  float* const gradients = memory.products(4, 1) + tile.local * (kTile + 1);  // ds
  k.load<T>(p.k, keys, tile.first, tile.end, D);
  v.load<T>(p.v, keys, tile.first, tile.end, D);
  float d_k[kColumns / kTeam] = {}, d_v[kColumns / kTeam] = {};
  for (int g = keys.segment_of(tile.first, p.segments);
       g < p.segments && keys.first_of(g) < tile.end; ++g) {
    if (keys.first_of(g) == keys.ends[g]) continue;  // no key of the tile
    const bool is_member = tile.place >= keys.first_of(g) && tile.place < keys.ends[g];
    for (int first = queries.first_of(g); first < queries.ends[g]; first += kTile) {
      __syncthreads();
      q.load<T>(p.q, queries, first, queries.ends[g], D);
      d_out.load<T>(p.d_out, queries, first, queries.ends[g], D);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int i = tile.member + n * kTeam;
        weights[i] = gradients[i] = 0;
        if (!is_member || first + i >= queries.ends[g] ||
            !sees(p, queries, first + i, keys, tile.place, g)) {
          continue;
        }
        const QueryStatistics query(p, queries, first + i);
        const Gradient pair(q.row(i), k.row(tile.local), d_out.row(i), v.row(tile.local), query.M,
                            query.inverse_Z, query.delta, p);
        weights[i] = pair.p;
        gradients[i] = pair.ds;
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns / kTeam; ++c) {
        const int d = tile.member + c * kTeam;
        if (d >= D) break;
        d_k[c] += weighted_sum(gradients, q, d);
        d_v[c] += weighted_sum(weights, d_out, d);
      }
    }
  }
  if (tile.place >= tile.end) return;
#pragma unroll
  for (int c = 0; c < kColumns / kTeam; ++c) {
    const int d = tile.member + c * kTeam;
    if (d >= D) break;
    p.d_k_places[tile.entry(p, p.keys) * D + d] = d_k[c] * p.scale;
    p.d_v_places[tile.entry(p, p.keys) * D + d] = d_v[c];
  }
}

// What a warp of merge, delta and add owns: a row of a list's tensor.
struct WarpRow {
  Head head;
  int row, lane;
  bool exists;
  std::int64_t number;  // in [B, H, rows]

  __device__ WarpRow(const GatheredParams& p, int rows) {
    number = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    lane = static_cast<int>(threadIdx.x % kWarp);
    row = static_cast<int>(number % rows);
    head = {number / rows / p.heads, number / rows % p.heads};
    exists = head.b < p.batch;
  }
  template <typename T>
  __device__ T* of(const GatheredRowsParams& x) const {
    return static_cast<T*>(x.data) + head.b * x.strides[0] + head.h * x.strides[1] +
           row * x.strides[2];
  }
  // The row's head in [B, H, P].
  __device__ std::int64_t first_place(const GatheredParams& p,
                                      const GatheredListsParams& lists) const {
    return (head.b * p.heads + head.h) * lists.places;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const GatheredParams p) {
  const WarpRow own(p, p.queries.rows);
  if (!own.exists) return;
  const HeadLists lists(p.queries, own.head, p.segments);
  const int begin = lists.starts[own.row], end = lists.starts[own.row + 1];
  const std::int64_t first = own.first_place(p, p.queries);
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

template <typename T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const GatheredParams p) {
  const WarpRow own(p, p.queries.rows);
  if (!own.exists) return;
  const T *d_out = own.of<T>(p.d_out), *out = own.of<T>(p.out);
  float delta = 0;
  for (int d = own.lane; d < p.head_dim; d += kWarp) delta += to_float(d_out[d]) * to_float(out[d]);
  delta = warp_sum(delta);
  if (p.d_sum != nullptr) delta -= p.d_sum[own.number] * p.sum[own.number];
  if (own.lane == 0) p.delta[own.number] = delta;
}

// The sums of the places of each row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const GatheredParams p, const GatheredListsParams lists, const float* places,
               const GatheredRowsParams sums) {
  const WarpRow own(p, lists.rows);
  if (!own.exists) return;
  const HeadLists of_head(lists, own.head, p.segments);
  for (int d = own.lane; d < p.head_dim; d += kWarp) {
    float sum = 0;
    for (int n = of_head.starts[own.row]; n < of_head.starts[own.row + 1]; ++n) {
      sum += places[(own.first_place(p, lists) + of_head.order[n]) * p.head_dim + d];
    }
    own.of<T>(sums)[d] = from_float<T>(sum);
  }
}

// One block for each tile of a list's places.
void launch_tiles(void (*kernel)(GatheredParams), const GatheredParams& p,
                  const GatheredListsParams& lists, std::size_t bytes, cudaStream_t stream) {
  const std::int64_t tiles = (lists.places + kTile - 1) / kTile;
  if (tiles == 0) return;
  cuda_check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(p.batch * p.heads * tiles)),
          .block = dim3(kThreads),
          .stream = stream,
          .shared_bytes = bytes},
         kernel, p);
}

// One warp for each row of a list's tensor.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const GatheredParams& p, int rows,
                 cudaStream_t stream, const Arguments&... arguments) {
  const std::int64_t warps = std::int64_t{p.batch} * p.heads * rows;
  launch({.grid = dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)),
          .block = dim3(kThreads),
          .stream = stream},
         kernel, p, arguments...);
}

// Calls f<T, kColumns>(), where kColumns >= D.
template <typename Function>
void with_shape(const GatheredParams& p, Function f) {
  const auto with_columns = [&]<typename T>() {
    if (p.head_dim <= 64) return f.template operator()<T, 64>();
    if (p.head_dim <= 128) return f.template operator()<T, 128>();
    f.template operator()<T, GatheredParams::kMostHeadDim>();
  };
  if (p.dtype == KernelDtype::kBFloat16) return with_columns.template operator()<__nv_bfloat16>();
  if (p.dtype == KernelDtype::kHalf) return with_columns.template operator()<__half>();
  with_columns.template operator()<float>();
}

}  // namespace

void launch_gathered_attention(const GatheredParams& params, cudaStream_t stream) {
  const GatheredParams& p = params;
  if (p.batch * p.heads == 0) return;
  with_shape(p, [&]<typename T, int kColumns>() {
    launch_tiles(&forward_kernel<T, kColumns>, p, p.queries, shared_bytes(p.head_dim, 2, 1),
                 stream);
    launch_rows(&merge_kernel<T>, p, p.queries.rows, stream);
  });
}

void launch_gathered_attention_backward(const GatheredParams& params, cudaStream_t stream) {
  const GatheredParams& p = params;
  if (p.batch * p.heads == 0) return;
  with_shape(p, [&]<typename T, int kColumns>() {
    launch_rows(&delta_kernel<T>, p, p.queries.rows, stream);
    launch_tiles(&query_gradients_kernel<T, kColumns>, p, p.queries, shared_bytes(p.head_dim, 4, 1),
                 stream);
    launch_tiles(&key_gradients_kernel<T, kColumns>, p, p.keys, shared_bytes(p.head_dim, 4, 2),
                 stream);
    launch_rows(&add_kernel<T>, p, p.queries.rows, stream, p.queries, p.d_q_places, p.d_q);
    launch_rows(&add_kernel<T>, p, p.keys.rows, stream, p.keys, p.d_k_places, p.d_k);
    launch_rows(&add_kernel<T>, p, p.keys.rows, stream, p.keys, p.d_v_places, p.d_v);
  });
}

}  // namespace birkhoff
