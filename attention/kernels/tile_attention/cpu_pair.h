// One pair of a query tile and a key tile, in scratch: the scratch matrices of a call of the loop,
// scores, and products with them. cpu_loop_body.h explains the layout. Included by files that are
// compiled with different flags from the rest: nothing here has external linkage.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/tile_attention/cpu_amx.h"
#include "attention/kernels/tile_attention/cpu_distances.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {
namespace {

// Scratch matrices of one call. D is padded to whole vectors, tiles to kTile rows. Operands that
// are pairs are stored either in rows, where neighbors along D form a pair ([kTile, columns / 2]),
// or stacked, where neighboring rows do ([kTile / 2, columns]). For other operands the two are the
// same.
template <typename T>
struct Scratch {
  using E = Operand<T>;
  using S = Sum<T>;
  static constexpr bool kPairs = kTakesPairs<T>;

  int columns;                                  // a multiple of the lanes, also in operands
  E *q, *d_out, *k, *v;                         // in rows
  E *q_t, *d_out_t;                             // the rows transposed, kTile wide
  E *q_stacked, *d_out_stacked, *key_stacked;   // only for pairs
  E *p_in_rows, *ds_in_rows, *weights_stacked;  // only for pairs, kTile wide
  S *acc, *d_key;                               // [kTile, columns]
  S *added_rows, *added_t;                      // [kTile, kTile]
  S *max, *sum;                                 // [kTile]
  S* pairs;                                     // p_t, ds_t and `kept` of each key tile
  DistanceScratch<T> distances{};

  static constexpr std::ptrdiff_t kPairSize = 2 * kTile * kTile + kTile * kTile / kBits<S>;
  S* p_t(int tile) const { return pairs + tile * kPairSize; }
  S* ds_t(int tile) const { return p_t(tile) + kTile * kTile; }
  Bit<S>* kept(int tile) const { return reinterpret_cast<Bit<S>*>(ds_t(tile) + kTile * kTile); }

  static std::size_t bytes(const TileShape& shape, int num_key_tiles) {
    const int wide = kTile * padded_columns<T>(shape.head_dim), square = kTile * kTile;
    const int operands = ((kPairs ? 9 : 6) * wide + (kPairs ? 3 : 0) * square) / kNumbers<E>;
    const std::ptrdiff_t sums = 2 * wide + 2 * square + num_key_tiles * kPairSize + 2 * kTile +
                                DistanceScratch<T>::numbers(shape);
    return static_cast<std::size_t>(operands) * sizeof(E) +
           static_cast<std::size_t>(sums) * sizeof(S);
  }

  Scratch(const TileShape& shape, void* memory) : columns(padded_columns<T>(shape.head_dim)) {
    auto* next = static_cast<std::byte*>(memory);
    const auto take = [&](auto& matrix, int count) {
      matrix = reinterpret_cast<std::remove_reference_t<decltype(matrix)>>(next);
      next += static_cast<std::size_t>(count) * sizeof(*matrix);
    };
    const int wide = kTile * columns / kNumbers<E>, square = kTile * kTile / kNumbers<E>;
    for (E** x : {&q, &d_out, &k, &v, &q_t, &d_out_t}) take(*x, wide);
    for (E** x : {&q_stacked, &d_out_stacked, &key_stacked}) take(*x, kPairs ? wide : 0);
    for (E** x : {&p_in_rows, &ds_in_rows, &weights_stacked}) take(*x, kPairs ? square : 0);
    for (S** x : {&acc, &d_key}) take(*x, kTile * columns);
    for (S** x : {&added_rows, &added_t}) take(*x, kTile * kTile);
    for (S** x : {&max, &sum}) take(*x, kTile);
    distances = {shape, reinterpret_cast<S*>(next)};
    pairs = reinterpret_cast<S*>(next) + DistanceScratch<T>::numbers(shape);
  }
};

// One (query tile, key tile) pair: the sizes, and which part of the products a causal tile needs.
template <typename T>
struct Pair {
  int queries, keys;  // padded to whole vectors and panels
  bool causal;
  int amx_depth;     // of cpu_amx.h
  const T* added_t;  // added to s_t: bias or -infinity, rows `added_stride` apart; null: 0
  std::ptrdiff_t added_stride;

  // Queries before this one see no key of key j's panel; their scores are not computed.
  int first_query(int j) const { return causal ? round_down(round_down(j, kPanel), kLanes<T>) : 0; }
  // No query of the vector that starts at query i sees keys from this one on.
  int end_key(int i) const { return causal ? min_of(keys, round_up(i + kLanes<T>, kPanel)) : keys; }
};

template <typename T>
Pair<Sum<T>> sizes_of(const QueryTile<T>& queries, const KeyTile<T>& keys, int head_dim) {
  const int num_queries = padded_rows<Sum<T>>(queries.num_queries);
  const int num_keys = round_up(keys.num_keys, kPanel);
  const int depth = amx_depth<Operand<T>>(num_queries, num_keys, head_dim, keys.causal);
  return {num_queries, num_keys, keys.causal, depth, nullptr, 0};
}

// sizes_of() with the mask and the bias, built in scratch.
template <typename T>
Pair<Sum<T>> masked_pair(const QueryTile<T>& queries, const KeyTile<T>& keys, int head_dim,
                         const Scratch<T>& x) {
  using S = Sum<T>;
  constexpr S kHidden = -__builtin_inf();
  Pair<S> pair = sizes_of(queries, keys, head_dim);
  const bool relative = queries.relative && keys.positions;
  if (keys.mask || keys.bias || relative) {
    pair.added_t = x.added_t;
    const auto added = [&](int i, int j) -> S {
      if (i >= queries.num_queries || j >= keys.num_keys) return 0;
      if (keys.mask && !keys.mask[i * keys.mask_query_stride + j * keys.mask_key_stride]) {
        return kHidden;
      }
      return keys.bias ? to_sum(keys.bias[i * keys.bias_query_stride + j * keys.bias_key_stride])
                       : 0;
    };
    if (keys.mask_key_stride == 0 && keys.bias_key_stride == 0 && !relative) {
      for (int i = 0; i < pair.queries; ++i) x.added_t[i] = added(i, 0);
    } else {
      pair.added_stride = kTile;
      if (relative) {
        spread_tile(x.distances.of_keys, x.distances.columns, queries, keys, x.added_rows);
      }
      if (keys.mask || keys.bias) {
        for (int i = 0; i < pair.queries; ++i) {
          for (int j = 0; j < kTile; ++j) {
            S& sum = x.added_rows[i * kTile + j];
            sum = relative ? sum + added(i, j) : added(i, j);
          }
        }
      }
      transpose_matrix(x.added_rows, pair.queries, kTile, kTile, x.added_t, kTile);
    }
  }
  return pair;
}

// s_t [keys, queries] = sum_d k_jd q_id, where the pair needs it. Summed in parts, because with
// large logits their errors dominate all other errors.
template <typename S, typename E>
void multiply_scores(const Pair<S>& pair, Rows<const E> k, const E* q_t, int head_dim, S* s_t) {
  constexpr int kInL1 = (32 << 10) / (kTile * static_cast<int>(sizeof(E)));  // rows of q_t
  const int depth = round_up(head_dim, kNumbers<E>) / kNumbers<E>;
  if constexpr (kUsesAmx<E>) {
    if (pair.amx_depth > 0) {
      for (int j = 0; j < pair.keys; j += kAmxRows) {
        const int first = pair.first_query(j);
        multiply_amx(pair.amx_depth, k.data + j * k.stride, k.stride, q_t + first, kTile, depth,
                     s_t + j * kTile + first, kTile, pair.queries - first, false);
      }
      return;
    }
  }
  for (int d = 0; d < depth; d += kInL1) {
    for (int j = 0; j < pair.keys; j += kPanel) {
      const int first = pair.first_query(j);
      multiply_panel<Summation::kInParts>(
          k.data + j * k.stride + d, k.stride, 1, q_t + d * kTile + first, kTile,
          min_of(kInL1, depth - d), s_t + j * kTile + first, kTile, pair.queries - first, d > 0);
    }
  }
}

// y [queries, columns] (+)= sum_j w_t[j][i] x_jd, both stacked. AMX needs w in rows, for which `w`
// is scratch.
template <typename S, typename E>
void multiply_to_queries(const Pair<S>& pair, const E* w_t, const E* x, int columns, S* y,
                         bool accumulate, [[maybe_unused]] E* w) {
  if constexpr (kUsesAmx<E>) {
    constexpr int kRow = kTile / kNumbers<E>;
    if (pair.amx_depth > 0) {
      transpose_matrix(w_t, round_up(pair.keys / kNumbers<E>, kAmxRows), pair.queries, kTile, w,
                       kRow);
      for (int i = 0; i < pair.queries; i += kAmxRows) {
        multiply_amx(pair.amx_depth, w + i * kRow, kRow, x, columns, pair.end_key(i) / kNumbers<E>,
                     y + i * columns, columns, columns, accumulate);
      }
      return;
    }
  }
  for (int i = 0; i < pair.queries; i += kPanel) {
    const int depth = pair.causal ? min_of(pair.keys, i + kPanel) : pair.keys;
    multiply_panel(w_t + i, 1, kTile, x, columns, depth / kNumbers<E>, y + i * columns, columns,
                   columns, accumulate);
  }
}

// y [keys, columns] = sum_i w_t[j][i] x_id; w_t in rows, x stacked.
template <typename S, typename E>
void multiply_to_keys(const Pair<S>& pair, const E* w_t, const E* x, int columns, S* y) {
  constexpr int kN = kNumbers<E>;
  if constexpr (kUsesAmx<E>) {
    if (pair.amx_depth > 0) {
      for (int j = 0; j < pair.keys; j += kAmxRows) {
        const int first = pair.first_query(j);
        multiply_amx(pair.amx_depth, w_t + (j * kTile + first) / kN, kTile / kN,
                     x + first / kN * columns, columns, (pair.queries - first) / kN,
                     y + j * columns, columns, columns, false);
      }
      return;
    }
  }
  for (int j = 0; j < pair.keys; j += kPanel) {
    const int first = pair.causal ? j : 0;
    multiply_panel(w_t + (j * kTile + first) / kN, kTile / kN, 1, x + first / kN * columns, columns,
                   (pair.queries - first) / kN, y + j * columns, columns, columns, false);
  }
}

// Scales s_t where the pair needs it, adds biases, and sets masked scores to -infinity. Never
// inlined: the compiler is free to contract to fused multiply-adds, and the backward pass must
// compute p from exactly the logits whose maximum the forward pass saved.
template <typename S>
[[gnu::noinline]] void finish_scores(const Pair<S>& pair, int num_keys, S scale, S* s_t) {
  constexpr S kHidden = -__builtin_inf();
  for (int j = 0; j < pair.keys; ++j) {
    for (int i = pair.first_query(j); i < pair.queries; i += kLanes<S>) {
      Vector<S> s = load(s_t + j * kTile + i) * scale;
      if (pair.added_t) s += load(pair.added_t + j * pair.added_stride + i);
      if (pair.causal && i < j) {
        Bits<S> query;
        for (int lane = 0; lane < kLanes<S>; ++lane) query[lane] = i + lane;
        s = query < j ? Vector<S>{} + kHidden : s;
      }
      store(s_t + j * kTile + i, j < num_keys ? s : Vector<S>{} + kHidden);
    }
  }
}

// d_bias += ds. Queries and keys that share an element of d_bias are added in the order of these
// loops.
template <typename T>
void add_bias_gradient(const Pair<Sum<T>>& pair, const Sum<T>* ds_t, int num_queries,
                       const KeyTile<T>& keys) {
  using S = Sum<T>;
  for (int j = 0; j < keys.num_keys; ++j) {
    double* d_bias = keys.d_bias + j * keys.d_bias_key_stride;
    const S* row = ds_t + j * kTile;
    const int first = pair.first_query(j);
    if (keys.d_bias_query_stride != 0) {
      for (int i = first; i < num_queries; ++i) d_bias[i * keys.d_bias_query_stride] += row[i];
      continue;
    }
    Vector<S> sum{};  // queries after the last have p = 0
    for (int i = first; i < pair.queries; i += kLanes<S>) sum += load(row + i);
    for (int lane = 0; lane < kLanes<S>; ++lane) *d_bias += sum[lane];
  }
}

}  // namespace
}  // namespace birkhoff
