// The CPU loop of all attention that reads a bounded number of keys: softmax of a tile of queries
// over a list of key tiles, forward and backward. A mechanism chooses the keys by making that list
// (its key source); the loop knows nothing else about it. Raw pointers, no LibTorch. The README of
// this folder explains the interface; block_attention/cpu_tasks.cpp and
// gathered_attention/cpu_segments.cpp use it.
//
// For query i with the visible keys j of its list, s_ij = scale sum_d q_id k_jd + bias_ij, and c_ij
// the factor that dropout gives a probability (0 or 1 / (1 - p); 1 without dropout):
//   m_i = max_j s_ij,  z_i = 1 / sum_j exp(s_ij - m_i),  p_ij = exp(s_ij - m_i) z_i,
//   out_id = sum_j c_ij p_ij v_jd;
//   d_p_ij = c_ij sum_d d_out_id v_jd,   ds_ij = p_ij (d_p_ij - sum_j p_ij d_p_ij),
//   d_q_id = scale sum_j ds_ij k_jd,  d_k_jd = scale sum_i ds_ij q_id,  d_bias_ij = ds_ij,
//   d_v_jd = sum_i c_ij p_ij d_out_id.
// Relative positions (Shaw et al. 2018, section 3.2) add the vectors a_r and b_r of two tables to
// the keys and values, where r is the distance of key j from query i, clipped:
//   s_ij += scale (sum_d q_id a_rd + the bias of r),  out_id += sum_j c_ij p_ij b_rd.
// A sink, a logit s0 of the head, takes part in the softmax as though it were a key with value 0:
//   m_i = max(s0, max_j s_ij),  z_i = 1 / (exp(s0 - m_i) + sum_j exp(s_ij - m_i)),
//   d_s0 = - sum_i exp(s0 - m_i) z_i sum_j p_ij d_p_ij.
// The backward pass recomputes p from m and z. They are separate because a single log-sum-exp would
// lose the digits of large logits to rounding. A query without a visible key has out = 0, m = z = 0
// and no gradient.
//
// NaN in q_i, in a bias of query i or in a key that it sees makes s_ij NaN. If an s_ij is NaN or
// overflows, all of out_i and z_i are NaN, and m_i is 0. NaN in the values propagates as the
// formulas say. cpu_nan.h keeps NaN away from queries that do not see it. NaN in a sink or in a
// table reaches all queries of its tile.
//
// T is float, double or Bf16. Sums have type Sum<T>, which is float for Bf16. With Bf16, s, m and z
// are float; out and gradients are rounded to bf16. p and ds are rounded to bf16 only if the
// instruction set multiplies bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels/common/number_types.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {

// The stride, in elements, of a table's rows of `size` elements of type Sum<T>: `size` rounded up
// to a multiple of 128 bytes.
template <typename T>
constexpr int whole_columns(int size) {
  constexpr int kWhole = 128 / static_cast<int>(sizeof(Sum<T>));
  return (size + kWhole - 1) / kWhole * kWhole;
}

// The tables of relative positions, in the type of sums. The distance of a key from a query is the
// key's position less the query's. A table has a row for each of the `num_distances` distances
// least, least + 1, ..; other distances are clipped to these. All rows are padded with zeros to
// whole_columns().
template <typename T>
struct TileDistances {
  int least = 0, num_distances = 0;
  const Sum<T>*keys = nullptr, *keys_t = nullptr;      // [num_distances, D], [D, num_distances]
  const Sum<T>*values = nullptr, *values_t = nullptr;  // null: no vectors for values
  const Sum<T>* bias = nullptr;                        // [num_distances]; null: 0
  // Backward adds sum_i ds_ir q_i to row r of d_keys, sum_i w_ir d_out_i to row r of d_values, and
  // sum_i ds_ir to element r of d_bias. ds_ir is the sum of ds_ij over the keys j at the distance
  // of row r from query i; w_ir is the same sum of the kept p_ij. To get the gradients, the caller
  // multiplies d_keys and d_bias by `scale` and d_values by dropout's 1 / (1 - p). d_keys and
  // d_values have whole_columns(num_distances) rows, padded like the tables' rows.
  Sum<T>*d_keys = nullptr, *d_values = nullptr, *d_bias = nullptr;
};

template <typename T>
struct QueryTile {
  int num_queries = 0;  // <= kTile
  Rows<const T> q;
  Rows<T> out;  // forward only
  // m and z [num_queries], written by forward, read by backward.
  Sum<T>*max = nullptr, *inverse_sum = nullptr;
  // For a call whose keys are only a part of the softmax. If out_sum is set, forward writes to it
  // instead of out. Backward takes m and z of the whole softmax. It adds rest_i [num_queries] to
  // sum_j p_ij d_p_ij in the formula of ds_ij (null: 0). If d_q_sum is set, backward adds to it
  // instead of writing d_q.
  Rows<Sum<T>> out_sum, d_q_sum;
  const Sum<T>* rest = nullptr;
  // Relative positions, for tiles of keys that have positions. Null: none.
  const TileDistances<T>* relative = nullptr;
  const std::int32_t* positions = nullptr;  // of the queries
  const Sum<T>* sink = nullptr;             // the head's; null: none
  double* d_sink = nullptr;                 // backward adds to it; null: not wanted
  std::uint64_t sample_id = 0;              // of the noise
  Rows<const T> d_out;                      // backward only
  Rows<T> d_q;
};

template <typename T>
struct KeyTile {
  int num_keys = 0;  // <= kTile
  Rows<const T> k, v;
  Sum<T> weight = 1;           // in the formulas, k and v are these rows times `weight`
  double* d_weight = nullptr;  // backward adds to it; null: not wanted
  bool causal = false;         // query i of its tile sees keys j <= i of this tile
  // mask[i * mask_query_stride + j * mask_key_stride] != 0: key j is visible to query i. Null: all.
  const bool* mask = nullptr;
  std::ptrdiff_t mask_query_stride = 0, mask_key_stride = 0;
  // Added to logits: bias[i * bias_query_stride + j * bias_key_stride]. Null: nothing.
  const T* bias = nullptr;
  std::ptrdiff_t bias_query_stride = 0, bias_key_stride = 0;
  const std::int32_t* positions = nullptr;  // of the keys; null: no relative positions
  std::int64_t first_element = 0;           // index of (query 0, key 0) in their sample's noise
  // The gradient of the bias is added to d_bias, whose strides may be 0. fp64, because these sums
  // cancel strongly. Null: not wanted.
  double* d_bias = nullptr;
  std::ptrdiff_t d_bias_query_stride = 0, d_bias_key_stride = 0;
  // Gradients are added to these sums or, if they are null, written to d_k and d_v.
  Rows<Sum<T>> d_k_sum, d_v_sum;
  Rows<T> d_k, d_v;
};

// Dropout of probabilities with the bits of philox_dropout (cluster/base/random/philox.h).
struct TileDropout {
  std::uint64_t key = 0;          // noise_key()
  std::uint32_t least = 0;        // floor(p 2^24): elements whose word >> 8 is less are dropped
  double scale = 1;               // of kept probabilities
  std::int64_t query_stride = 0;  // elements of noise from one query to the next
};

struct TileShape {
  int head_dim = 0;
  double scale = 0;
  const TileDropout* dropout = nullptr;  // null: none
  int num_distances = 0;                 // of relative positions; 0: none
};

// The reaction of a backward pass to NaN: return false without results, or continue as the formulas
// say.
enum class OnNaN { kStop, kGoOn };

// A call runs on the calling thread only; equal arguments give equal bits. `scratch` has
// scratch_bytes(shape, num_key_tiles) bytes, aligned to 64, uninitialized; for forward,
// scratch_bytes(shape, 1) is enough.
//
// Both passes return true if they met no NaN. A pass that met NaN has multiplied masked keys, too,
// by p = 0. So NaN of a key may be in the results of a query that does not see this key, and NaN of
// a query in the results of a key that this query does not see.
template <typename T>
struct TileKernels {
  std::size_t (*scratch_bytes)(const TileShape& shape, int num_key_tiles);
  bool (*forward)(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
                  int num_key_tiles, void* scratch);
  bool (*backward)(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
                   int num_key_tiles, OnNaN on_nan, void* scratch);
  // Rounds contiguous sums [num_rows, head_dim] to rows of T.
  void (*write_rows)(const Sum<T>* sums, int num_rows, int head_dim, Rows<T> rows);
  // y = exp(x). The relative error is at most 2 eps (the type's distance from 1 to the next value)
  // where exp(x) is a normal number and x <= 80. Where exp(x) is smaller than that, y is 0.
  void (*exp)(const Sum<T>* x, Sum<T>* y, std::size_t n);
};

// For T = float, double and Bf16. kAvx512Bf16 multiplies bf16 with vdpbf16ps, kAmxBf16 with AMX
// where the number of queries, the number of keys and D are multiples of 16; both share the kernels
// for float and double with kAvx512. The other sets widen bf16 to float as they read it.
template <typename T>
const TileKernels<T>& tile_kernels(InstructionSet set = instruction_set());

// Defined in cpu_loop.simd.cpp, compiled for kSet.
template <InstructionSet kSet, typename T>
const TileKernels<T>& compiled_tile_kernels();

}  // namespace birkhoff
