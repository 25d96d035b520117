// Attention over gathered rows (gathered_attention.h). Legend: i slot of a query, j slot of a key
// in the same segment that i sees, r(i) the row at a slot, d of D; t = t(i, j) the row of the
// tables of relative positions for the distance r(j) - r(i); M_ij 1, or under dropout 0 or
// 1 / (1 - p). Lists and keys are those of the query's key head.
//
//   s_ij = scale (sum_d q_r(i)d k_r(j)d + a_r(i)t),  m_i = max_j s_ij,
//   l_i = sum_j exp(s_ij - m_i),  o_id = sum_j exp(s_ij - m_i) M_ij v_r(j)d / l_i
//
// with a_rt of DistanceParams::scores, 0 without. If values have relative positions, the sums of
// exp(s_ij - m_i) M_ij / l_i over the keys j of each row t are stored, and their product with the
// table is added to o before slots are merged (relative_positions/gpu_terms.h).
//
// and of each row r, over its slots i, in ascending order (the inverse list):
//
//   M_r = max_i m_i,  Z_r = sum_i l_i exp(m_i - M_r),
//   out_rd = sum_i l_i exp(m_i - M_r) o_id / Z_r
//
// Backward, with r = r(i), p_ij = exp(s_ij - M_r) / Z_r:
//
//   delta_r = sum_d d_out_rd out_rd - d_Z_r Z_r,
//   ds_ij = p_ij (M_ij (sum_d d_out_rd v_r(j)d + u_rt) - delta_r),
//   d_q_id = scale sum_j ds_ij k_r(j)d,  d_k_jd = scale sum_i ds_ij q_r(i)d,
//   d_v_jd = sum_i p_ij M_ij d_out_r(i)d,
//
// with u_rt of DistanceParams::of_values, and the gradient of a row is the sum over its slots;
// gradients of keys are also sums over the query heads of the key head. The sums of ds_ij, and of
// p_ij M_ij, over the keys of each row t are stored for the tables' gradients and their part of
// d_q. The kernels here compute in fp32; results of slots and of rows are rounded to the rows'
// type.
//
// With a mean, over the n_r slots i of row r that see a key, a sink z is one more logit of each i:
// m_i = max(z, max_j s_ij), and exp(z - m_i) is added to l_i. Then
//
//   out_rd = sum_i o_id / n_r,  p_ij = exp(s_ij - m_i) / (n_r l_i),
//   delta_i = sum_d d_out_rd o_id,  d_z = -sum_i exp(z - m_i) / (n_r l_i) delta_i.
//
// forward, query_gradients: a block of 256 threads owns kTile successive slots of queries of a
//   head, which may be in several segments, and reads the keys of these segments in tiles of kTile.
// key_gradients: the same with queries and keys exchanged. A block owns slots of a key head and
//   reads the queries of all its heads.
//   Eight threads own a slot: of each kTile x kTile product a thread has kTile / 8 elements, of D
//   columns every eighth. Shared memory: two (forward) or four tiles of rows and one or two of
//   products, 13 KiB (D = 32) to 137 KiB (D = 256). Sums over the keys of a row t of the tables
//   belong to thread t % 8.
// merge, average, delta, mean_delta, add (gpu_slots.cuh): eight threads own a row.
// With GatheredParams::tensor_cores the kernels of tiles/ replace the first three, and lists that
// have no row twice need no merge and no sums: results of slots are written to rows.
//
// Results belong to slots and then to rows: no atomics, fixed orders, the same bits each time.
#include <math.h>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/gpu_slots.cuh"
#include "attention/kernels/gathered_attention/gpu_tiles.cuh"
#include "attention/kernels/tile_attention/gpu_tiles.h"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

namespace {

// The number of blocks of a backward kernel for which a multiprocessor has registers. D above 128
// leaves hardly any shared memory for a second one.
constexpr int backward_blocks(int columns) { return columns > 128 ? 1 : 2; }

std::size_t shared_bytes(int head_dim, int row_tiles, int product_tiles) {
  return sizeof(float) * kTile *
         static_cast<std::size_t>(row_tiles * (head_dim + 1) + product_tiles * (kTile + 1));
}

// A pair's number for its distance (DistanceParams); 0 without numbers.
struct PairNumbers {
  const GatheredParams& p;
  GpuHead head;  // of the query
  const GpuHeadLists &queries, &keys;

  __device__ float at(const float* numbers, int query, int key) const {
    if (numbers == nullptr) return 0;
    return number_of_pair(p, numbers, head, queries.row(query), keys.row(key));
  }
  // The factor that dropout gives the pair's probability.
  __device__ float kept(const SampleNoise& noise, int query, int key, int segment) const {
    if (p.dropout.p == 0) return 1;
    const int rank = key - keys.first_of(segment);
    return noise.factor(p.dropout,
                        static_cast<std::uint64_t>(p.dropout.element(head.h, query, rank)));
  }
};

// Adds up a query's pairs with the keys of a tile by their distance: the team's thread t % kTeam
// owns row t of the tables.
struct DistanceSums {
  const DistanceParams& distances;
  float* sums;  // the query's, [rows]; null: none
  int member;

  __device__ DistanceSums(const GatheredParams& p, float* numbers, std::int64_t place, int thread)
      : distances(p.distances),
        sums(numbers == nullptr ? nullptr : numbers + place * p.distances.rows),
        member(thread) {}
  __device__ void add(const float* pairs, int query_row, const GpuHeadLists& keys, int first,
                      int end) const {
    if (sums == nullptr) return;
#pragma unroll 1
    for (int j = 0; j < kTile && first + j < end; ++j) {
      const int row = distances.row_of(keys.row(first + j) - query_row);
      if (row % kTeam == member) sums[row] += pairs[j];
    }
  }
  __device__ void multiply(float factor) const {
    if (sums == nullptr || factor == 1) return;
#pragma unroll 1
    for (int row = member; row < distances.rows; row += kTeam) sums[row] *= factor;
  }
  __device__ void set(float value) const {
    if (sums == nullptr) return;
#pragma unroll 1
    for (int row = member; row < distances.rows; row += kTeam) sums[row] = value;
  }
};

// The logit of a query and a key with the number `a` for their distance. Rounded before anything is
// subtracted from it, so that both passes have the same bits.
__device__ inline float logit(const float* q, const float* k, float a, const GatheredParams& p) {
  return __fmul_rn(__fadd_rn(product(q, k, p.head_dim), a), p.scale);
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const GatheredParams p) {
  const BlockHead block(p.heads, tiles_of(p.queries));
  const GpuHead head = block.head, of_keys = key_head(p, head, p.heads);
  const GpuHeadLists queries(p.queries, of_keys, p.segments), keys(p.keys, of_keys, p.segments);
  const Tile tile(queries, block.number);
  if (tile.first >= tile.end) return;
  const int D = p.head_dim;
  const Memory memory(D);
  const RowTile q = memory.rows(0), k_or_v = memory.rows(1);
  float* const weights = memory.products(2, 0) + tile.local * (kTile + 1);
  const int slot = min(tile.slot, tile.end - 1);
  const PairNumbers numbers{p, head, queries, keys};
  const SampleNoise noise(p.dropout, head.b);
  // Not of a slot that another team has.
  const DistanceSums sums(p, tile.slot < tile.end ? p.distances.p : nullptr,
                          place_of_query(p, head, queries, slot), tile.member);
  sums.set(0);
  q.load<T>(p.q, head, queries, tile.first, tile.end, D);
  float m = -INFINITY, l = 0, o[kColumns / kTeam] = {};
  for (int g = first_segment(queries, tile, p.segments);
       g < p.segments && queries.first_of(g) < tile.end; ++g) {
    if (queries.first_of(g) == queries.ends[g]) continue;  // no query of the tile
    const bool is_member = tile.slot >= queries.first_of(g) && tile.slot < queries.ends[g];
    for (int first = keys.first_of(g); first < keys.ends[g]; first += kTile) {
      __syncthreads();
      k_or_v.load<T>(p.k, of_keys, keys, first, keys.ends[g], D);
      __syncthreads();
      float s[kPairs], tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int j = tile.member + n * kTeam;
        s[n] = -INFINITY;
        if (is_member && first + j < keys.ends[g] &&
            sees(p, queries, tile.slot, keys, first + j, g)) {
          s[n] = logit(q.row(tile.local), k_or_v.row(j),
                       numbers.at(p.distances.scores, tile.slot, first + j), p);
        }
        tile_max = fmaxf(tile_max, s[n]);
      }
      const float new_m = fmaxf(m, team_max(tile_max));
      const float shift = new_m == -INFINITY ? 0.0f : new_m;
      const float factor = expf(m - shift);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const float weight = expf(s[n] - shift);
        const int j = tile.member + n * kTeam;
        weights[j] = weight == 0 ? 0 : weight * numbers.kept(noise, tile.slot, first + j, g);
        sum += weight;
      }
      m = new_m;
      l = l * factor + lane_sum<kTeam>(sum);
      __syncthreads();
      k_or_v.load<T>(p.v, of_keys, keys, first, keys.ends[g], D);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns / kTeam; ++c) {
        const int d = tile.member + c * kTeam;
        if (d >= D) break;
        o[c] = o[c] * factor + weighted_sum(weights, k_or_v, d);
      }
      sums.multiply(factor);
      if (is_member) sums.add(weights, queries.row(slot), keys, first, keys.ends[g]);
    }
  }
  if (tile.slot >= tile.end) return;
  if (p.sink != nullptr && l != 0) {
    const float sink = p.sink[head.h], new_m = fmaxf(m, sink), factor = expf(m - new_m);
    l = l * factor + expf(sink - new_m);
    m = new_m;
#pragma unroll
    for (int c = 0; c < kColumns / kTeam; ++c) o[c] *= factor;
    sums.multiply(factor);
  }
  sums.multiply(l == 0 ? 0 : 1 / l);
  const std::int64_t entry = entry_of(head, p.heads, p.queries.slots, tile.slot);
  T* const slot_out = row_of<T>(p.slot_out, head, tile.slot);
#pragma unroll
  for (int c = 0; c < kColumns / kTeam; ++c) {
    const int d = tile.member + c * kTeam;
    if (d < D) slot_out[d] = from_float<T>(l == 0 ? 0.0f : o[c] / l);
  }
  if (tile.member == 0) {
    p.slot_max[entry] = l > 0 ? m : 0.0f;
    p.slot_sum[entry] = l;
  }
}

// p_ij and ds_ij of a query and a key, whose rows lie in shared memory; M, 1 / Z and delta are the
// query's.
struct Gradient {
  float p, ds;  // p with dropout's factor
  __device__ Gradient(const float* q, const float* k, const float* d_out, const float* v, float a,
                      float u, float kept, const QueryStatistics& query,
                      const GatheredParams& params) {
    const float share = expf(logit(q, k, a, params) - query.M) * query.inverse_Z;
    ds = share * (kept * (product(d_out, v, params.head_dim) + u) - query.delta);
    p = share * kept;
  }
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, backward_blocks(kColumns))
    query_gradients_kernel(const GatheredParams p) {
  const BlockHead block(p.heads, tiles_of(p.queries));
  const GpuHead head = block.head, of_keys = key_head(p, head, p.heads);
  const GpuHeadLists queries(p.queries, of_keys, p.segments), keys(p.keys, of_keys, p.segments);
  const Tile tile(queries, block.number);
  if (tile.first >= tile.end) return;
  const int D = p.head_dim;
  const Memory memory(D);
  const RowTile q = memory.rows(0), d_out = memory.rows(1), k = memory.rows(2), v = memory.rows(3);
  float* const gradients = memory.products(4, 0) + tile.local * (kTile + 1);  // ds
  float* const weights = memory.products(4, 1) + tile.local * (kTile + 1);    // p
  q.load<T>(p.q, head, queries, tile.first, tile.end, D);
  d_out.load<T>(p.d_out, head, queries, tile.first, tile.end, D);
  const int slot = min(tile.slot, tile.end - 1);
  const QueryStatistics own(p, head, queries, slot);
  const PairNumbers numbers{p, head, queries, keys};
  const SampleNoise noise(p.dropout, head.b);
  const std::int64_t place = place_of_query(p, head, queries, slot);
  const DistanceSums sums_of_ds(p, p.distances.d_s, place, tile.member),
      sums_of_p(p, p.distances.p, place, tile.member);
  float d_q[kColumns / kTeam] = {};
  for (int g = first_segment(queries, tile, p.segments);
       g < p.segments && queries.first_of(g) < tile.end; ++g) {
    if (queries.first_of(g) == queries.ends[g]) continue;  // no query of the tile
    const bool is_member = tile.slot >= queries.first_of(g) && tile.slot < queries.ends[g];
    for (int first = keys.first_of(g); first < keys.ends[g]; first += kTile) {
      __syncthreads();
      k.load<T>(p.k, of_keys, keys, first, keys.ends[g], D);
      v.load<T>(p.v, of_keys, keys, first, keys.ends[g], D);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int j = tile.member + n * kTeam, key = first + j;
        weights[j] = gradients[j] = 0;
        if (!is_member || key >= keys.ends[g] || !sees(p, queries, tile.slot, keys, key, g)) {
          continue;
        }
        const Gradient pair(q.row(tile.local), k.row(j), d_out.row(tile.local), v.row(j),
                            numbers.at(p.distances.scores, slot, key),
                            numbers.at(p.distances.of_values, slot, key),
                            numbers.kept(noise, slot, key, g), own, p);
        weights[j] = pair.p;
        gradients[j] = pair.ds;
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns / kTeam; ++c) {
        const int d = tile.member + c * kTeam;
        if (d >= D) break;
        d_q[c] += weighted_sum(gradients, k, d);
      }
      if (!is_member) continue;
      sums_of_ds.add(gradients, queries.row(slot), keys, first, keys.ends[g]);
      sums_of_p.add(weights, queries.row(slot), keys, first, keys.ends[g]);
    }
  }
  T* const of_slot = row_of<T>(p.d_q_slots, head, tile.slot);
#pragma unroll
  for (int c = 0; c < kColumns / kTeam; ++c) {
    const int d = tile.member + c * kTeam;
    if (tile.slot < tile.end && d < D) of_slot[d] = from_float<T>(d_q[c] * p.scale);
  }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, backward_blocks(kColumns))
    key_gradients_kernel(const GatheredParams p) {
  const BlockHead block(p.key_heads, tiles_of(p.keys));
  const GpuHead of_keys = block.head;
  const GpuHeadLists queries(p.queries, of_keys, p.segments), keys(p.keys, of_keys, p.segments);
  const Tile tile(keys, block.number);
  if (tile.first >= tile.end) return;
  const int D = p.head_dim, group = p.heads / p.key_heads;
  const Memory memory(D);
  const RowTile k = memory.rows(0), v = memory.rows(1), q = memory.rows(2), d_out = memory.rows(3);
  float* const weights = memory.products(4, 0) + tile.local * (kTile + 1);    // p
  float* const gradients = memory.products(4, 1) + tile.local * (kTile + 1);  // ds
  k.load<T>(p.k, of_keys, keys, tile.first, tile.end, D);
  v.load<T>(p.v, of_keys, keys, tile.first, tile.end, D);
  const SampleNoise noise(p.dropout, of_keys.b);
  float d_k[kColumns / kTeam] = {}, d_v[kColumns / kTeam] = {};
  for (int g = first_segment(keys, tile, p.segments); g < p.segments && keys.first_of(g) < tile.end;
       ++g) {
    if (keys.first_of(g) == keys.ends[g]) continue;  // no key of the tile
    const bool is_member = tile.slot >= keys.first_of(g) && tile.slot < keys.ends[g];
    for (int of_group = 0; of_group < group; ++of_group) {
      const GpuHead head{of_keys.b, of_keys.h * group + of_group};
      const PairNumbers numbers{p, head, queries, keys};
      for (int first = queries.first_of(g); first < queries.ends[g]; first += kTile) {
        __syncthreads();
        q.load<T>(p.q, head, queries, first, queries.ends[g], D);
        d_out.load<T>(p.d_out, head, queries, first, queries.ends[g], D);
        __syncthreads();
#pragma unroll 2  // whole, it would need more registers
        for (int n = 0; n < kPairs; ++n) {
          const int i = tile.member + n * kTeam, query = first + i;
          weights[i] = gradients[i] = 0;
          if (!is_member || query >= queries.ends[g] ||
              !sees(p, queries, query, keys, tile.slot, g)) {
            continue;
          }
          const Gradient pair(q.row(i), k.row(tile.local), d_out.row(i), v.row(tile.local),
                              numbers.at(p.distances.scores, query, tile.slot),
                              numbers.at(p.distances.of_values, query, tile.slot),
                              numbers.kept(noise, query, tile.slot, g),
                              QueryStatistics(p, head, queries, query), p);
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
  }
  if (tile.slot >= tile.end) return;
  T* const d_k_slot = row_of<T>(p.d_k_slots, of_keys, tile.slot);
  T* const d_v_slot = row_of<T>(p.d_v_slots, of_keys, tile.slot);
#pragma unroll
  for (int c = 0; c < kColumns / kTeam; ++c) {
    const int d = tile.member + c * kTeam;
    if (d >= D) break;
    d_k_slot[d] = from_float<T>(d_k[c] * p.scale);
    d_v_slot[d] = from_float<T>(d_v[c]);
  }
}

// `blocks` blocks for each of `heads` heads.
void launch_blocks(void (*kernel)(GatheredParams), const GatheredParams& p, int heads, int blocks,
                   std::size_t bytes, cudaStream_t stream) {
  launch({.blocks = std::int64_t{p.batch} * heads * blocks,
          .threads = kThreads,
          .stream = stream,
          .shared_bytes = bytes},
         kernel, p);
}

// One team for each row of a list's tensor of `heads` heads.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const GatheredParams& p, int heads, int rows,
                 cudaStream_t stream, const Arguments&... arguments) {
  const std::int64_t all = std::int64_t{p.batch} * heads * rows;
  launch({.blocks = (all + kRowsOfBlock - 1) / kRowsOfBlock,
          .threads = kTeamThreads,
          .stream = stream},
         kernel, p, arguments...);
}

// Calls f<T, kColumns>(), where kColumns >= D.
template <typename Function>
void with_shape(const GatheredParams& p, Function f) {
  with_element_type(p.dtype, [&]<typename T>() {
    with_head_dim(p.head_dim, [&]<int kColumns>() { f.template operator()<T, kColumns>(); });
  });
}

}  // namespace

void launch_gathered_slots(const GatheredParams& params, cudaStream_t stream) {
  const GatheredParams& p = params;
  with_shape(p, [&]<typename T, int kColumns>() {
    if (p.tensor_cores) return launch_gathered_tiles<kColumns>(p, stream);
    launch_blocks(&forward_kernel<T, kColumns>, p, p.heads, tiles_of(p.queries),
                  shared_bytes(p.head_dim, 2, 1), stream);
  });
}

void launch_gathered_merge(const GatheredParams& params, cudaStream_t stream) {
  const GatheredParams& p = params;
  if (p.queries.once) return;
  with_element_type(p.dtype, [&]<typename T>() {
    launch_rows(p.mean ? &average_kernel<T> : &merge_kernel<T>, p, p.heads, p.queries.rows, stream);
  });
}

void launch_gathered_attention_backward(const GatheredParams& params, cudaStream_t stream) {
  const GatheredParams& p = params;
  with_shape(p, [&]<typename T, int kColumns>() {
    launch_rows(p.mean ? &mean_delta_kernel<T> : &delta_kernel<T>, p, p.heads, p.queries.rows,
                stream);
    if (p.tensor_cores) {
      launch_gathered_tiles_backward<kColumns>(p, stream);
    } else {
      const std::size_t bytes = shared_bytes(p.head_dim, 4, 2);
      launch_blocks(&query_gradients_kernel<T, kColumns>, p, p.heads, tiles_of(p.queries), bytes,
                    stream);
      launch_blocks(&key_gradients_kernel<T, kColumns>, p, p.key_heads, tiles_of(p.keys), bytes,
                    stream);
    }
    const auto add = [&](int heads, const GatheredListsParams& lists, const RowsParams& numbers,
                         const RowsParams& sums) {
      if (lists.once) return;
      launch_rows(&add_kernel<T>, p, heads, lists.rows, stream, heads, lists, numbers, p.head_dim,
                  sums);
    };
    add(p.heads, p.queries, p.d_q_slots, p.d_q);
    add(p.key_heads, p.keys, p.d_k_slots, p.d_k);
    add(p.key_heads, p.keys, p.d_v_slots, p.d_v);
  });
}

void launch_sums_of_slots(const GatheredParams& params, const RowsParams& numbers, int columns,
                          const RowsParams& sums, cudaStream_t stream) {
  launch_rows(&add_kernel<float>, params, params.heads, params.queries.rows, stream, params.heads,
              params.queries, numbers, columns, sums);
}

}  // namespace birkhoff
