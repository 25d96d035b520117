// The loop of cpu_loop.h, compiled once for each instruction set.
//
// Scores are stored transposed, s_t[j][i], with one query in each lane. The softmax over keys then
// runs down the rows and never across lanes, and only q and d_out are transposed, once for all key
// tiles. Every product is c[m][n] (+)= sum_k a(m, k) b[k][n] over scratch. Rows are copied to
// scratch, except an `a` that is read only once: in a [B, L, H, D] tensor they lie a power of two
// apart and would evict one another from L1. One thread owns a whole call.
//
// With vdpbf16ps, k counts pairs of bf16, and operands are laid out in pairs. Without it, bf16 is
// widened to float on the way to scratch, and the loop is that of float.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/tile_attention/cpu_dropout.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {
namespace {

// Scratch matrices of one call. D is padded to whole vectors, tiles to kTile rows. Operands that
// are pairs are stored either in rows, where neighbours along D form a pair ([kTile, columns / 2]),
// or stacked, where neighbouring rows do ([kTile / 2, columns]). For other operands the two are the
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

  static constexpr std::ptrdiff_t kPairSize = 2 * kTile * kTile + kTile * kTile / kBits<S>;
  S* p_t(int tile) const { return pairs + tile * kPairSize; }
  S* ds_t(int tile) const { return p_t(tile) + kTile * kTile; }
  Bit<S>* kept(int tile) const { return reinterpret_cast<Bit<S>*>(ds_t(tile) + kTile * kTile); }

  static std::size_t bytes(int head_dim, int num_key_tiles) {
    const int wide = kTile * padded_columns<T>(head_dim), square = kTile * kTile;
    const int operands = ((kPairs ? 9 : 6) * wide + (kPairs ? 3 : 0) * square) / kNumbers<E>;
    const std::ptrdiff_t sums = 2 * wide + 2 * square + num_key_tiles * kPairSize + 2 * kTile;
    return static_cast<std::size_t>(operands) * sizeof(E) +
           static_cast<std::size_t>(sums) * sizeof(S);
  }

  Scratch(int head_dim, void* memory) : columns(padded_columns<T>(head_dim)) {
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
    pairs = reinterpret_cast<S*>(next);
  }
};

// One (query tile, key tile) pair: the sizes, and which part of the products a causal tile needs.
template <typename T>
struct Pair {
  int queries, keys;  // padded to whole vectors and panels
  bool causal;
  const T* added_t;  // added to s_t: bias or -infinity, rows `added_stride` apart; null: 0
  std::ptrdiff_t added_stride;

  // Queries before this one see no key of key j's panel; their scores are not computed.
  int first_query(int j) const { return causal ? round_down(round_down(j, kPanel), kLanes<T>) : 0; }
  // No query of the vector that starts at query i sees keys from this one on.
  int end_key(int i) const { return causal ? min_of(keys, round_up(i + kLanes<T>, kPanel)) : keys; }
};

template <typename T>
Pair<Sum<T>> sizes_of(const QueryTile<T>& queries, const KeyTile<T>& keys) {
  return {padded_rows<Sum<T>>(queries.num_queries), round_up(keys.num_keys, kPanel), keys.causal,
          nullptr, 0};
}

// sizes_of() with the mask and the bias, built in scratch.
template <typename T>
Pair<Sum<T>> masked_pair(const QueryTile<T>& queries, const KeyTile<T>& keys, const Scratch<T>& x) {
  using S = Sum<T>;
  constexpr S kHidden = -__builtin_inf();
  Pair<S> pair = sizes_of(queries, keys);
  if (keys.mask || keys.bias) {
    pair.added_t = x.added_t;
    const auto added = [&](int i, int j) -> S {
      if (i >= queries.num_queries || j >= keys.num_keys) return 0;
      if (keys.mask && !keys.mask[i * keys.mask_query_stride + j * keys.mask_key_stride]) {
        return kHidden;
      }
      return keys.bias ? to_sum(keys.bias[i * keys.bias_query_stride + j * keys.bias_key_stride])
                       : 0;
    };
    if (keys.mask_key_stride == 0 && keys.bias_key_stride == 0) {
      for (int i = 0; i < pair.queries; ++i) x.added_t[i] = added(i, 0);
    } else {
      pair.added_stride = kTile;
      for (int i = 0; i < pair.queries; ++i) {
        for (int j = 0; j < kTile; ++j) x.added_rows[i * kTile + j] = added(i, j);
      }
      transpose_matrix(x.added_rows, pair.queries, kTile, kTile, x.added_t, kTile);
    }
  }
  return pair;
}

// s_t [keys, queries] = sum_d k_jd q_id, where the pair needs it. Summed in parts, because with
// large logits their errors cause the errors of everything else.
template <typename S, typename E>
void multiply_scores(const Pair<S>& pair, Rows<const E> k, const E* q_t, int head_dim, S* s_t) {
  constexpr int kInL1 = (32 << 10) / (kTile * static_cast<int>(sizeof(E)));  // rows of q_t
  const int depth = round_up(head_dim, kNumbers<E>) / kNumbers<E>;
  for (int d = 0; d < depth; d += kInL1) {
    for (int j = 0; j < pair.keys; j += kPanel) {
      const int first = pair.first_query(j);
      multiply_panel<Summation::kInParts>(
          k.data + j * k.stride + d, k.stride, 1, q_t + d * kTile + first, kTile,
          min_of(kInL1, depth - d), s_t + j * kTile + first, kTile, pair.queries - first, d > 0);
    }
  }
}

// y [queries, columns] (+)= sum_j w_t[j][i] x_jd, both stacked.
template <typename S, typename E>
void multiply_to_queries(const Pair<S>& pair, const E* w_t, const E* x, int columns, S* y,
                         bool accumulate) {
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
  for (int j = 0; j < pair.keys; j += kPanel) {
    const int first = pair.causal ? j : 0;
    multiply_panel(w_t + (j * kTile + first) / kN, kTile / kN, 1, x + first / kN * columns, columns,
                   (pair.queries - first) / kN, y + j * columns, columns, columns, false);
  }
}

// Scales s_t where the pair needs it, adds biases, and sets masked scores to -infinity. Never
// inlined: the compiler contracts to fused multiply-adds as it likes, and the backward pass must
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

template <typename T>
bool forward(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
             int num_key_tiles, void* memory) {
  using S = Sum<T>;
  using E = Operand<T>;
  constexpr int kN = kLanes<S>;
  constexpr S kInfinity = __builtin_inf();
  const Scratch<T> x(shape.head_dim, memory);
  const int columns = x.columns, D = shape.head_dim;
  const S scale = static_cast<S>(shape.scale);
  S* s_t = x.p_t(0);
  E* weights = nullptr;
  if constexpr (x.kPairs) {
    weights = x.weights_stacked;
  } else {
    weights = s_t;
  }
  if (num_key_tiles > 0) prefetch_rows<Use::kRead>(keys[0].k, keys[0].num_keys, D);
  load_rows(queries.q, queries.num_queries, D, columns, x.q);
  transpose_matrix(x.q, padded_rows<S>(queries.num_queries), columns / kNumbers<E>,
                   columns / kNumbers<E>, x.q_t, kTile);
  for (int i = 0; i < kTile; ++i) {
    x.max[i] = -kInfinity;
    x.sum[i] = 0;
  }

  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<S> pair = masked_pair(queries, key, x);
    const Rows<const E> k = operand_rows(key.k, key.num_keys, D, columns, x.k);
    prefetch_rows<Use::kRead>(key.v, key.num_keys, D);
    multiply_scores(pair, k, x.q_t, D, s_t);
    load_rows(key.v, key.num_keys, D, columns, x.v);
    if (tile + 1 < num_key_tiles) {
      prefetch_rows<Use::kRead>(keys[tile + 1].k, keys[tile + 1].num_keys, D);
    } else {
      prefetch_rows<Use::kWrite>(queries.out, queries.num_queries, D);
    }
    finish_scores(pair, key.num_keys, scale, s_t);
    const Bit<S>* kept = draw_kept(shape, queries, pair.queries, key, x.kept(0));
    S factor[kTile];  // rescales earlier tiles to the new maximum
    for (int i = 0; i < pair.queries; i += kN) {
      const int end_key = pair.end_key(i);
      const Vector<S> old_max = load(x.max + i);
      Vector<S> max = old_max;
      for (int j = 0; j < end_key; ++j) {
        const Vector<S> s = load(s_t + j * kTile + i);
        max = s > max ? s : max;
      }
      // A query that has seen no key so far keeps the maximum -infinity and subtracts 0.
      const Vector<S> shift = max == -kInfinity ? Vector<S>{} : max;
      Vector<S> sum{};
      for (int panel = 0; panel < end_key; panel += kPanel) {
        Vector<S> panel_sum{};
        for (int j = panel; j < panel + kPanel; j += kNumbers<E>) {
          Vector<S> p[kNumbers<E>];
          for (int n = 0; n < kNumbers<E>; ++n) {
            p[n] = exp<S>(load(s_t + (j + n) * kTile + i) - shift);
            panel_sum += p[n];
            p[n] = keep<S>(p[n], kept, j + n, i);
          }
          store_stacked(p, j, i, weights);
        }
        sum += panel_sum;
      }
      const Vector<S> f = exp<S>(old_max - shift);
      store(factor + i, f);
      store(x.max + i, max);
      store(x.sum + i, load(x.sum + i) * f + sum);
    }
    if (tile > 0) {
      for (int i = 0; i < queries.num_queries; ++i) {
        if (factor[i] == 1) continue;  // the usual case after a few tiles
        for (int d = 0; d < columns; ++d) x.acc[i * columns + d] *= factor[i];
      }
    }
    multiply_to_queries(pair, weights, stack_rows(x.v, pair.keys, columns, x.key_stacked), columns,
                        x.acc, tile > 0);
  }

  // A NaN logit makes its query's sum NaN. A NaN value makes the last row NaN, among others: that
  // row has products with all values that any row has products with.
  const bool met_nan =
      has_nan(x.sum, kTile) ||
      (num_key_tiles > 0 && has_nan(x.acc + (queries.num_queries - 1) * columns, columns));
  S inverse[kTile];
  for (int i = 0; i < kTile; i += kN) {
    const Vector<S> sum = load(x.sum + i);
    store(inverse + i, sum != 0 ? 1 / sum : Vector<S>{});
    store(x.max + i, sum > 0 ? load(x.max + i) : Vector<S>{});
  }
  const std::size_t bytes = sizeof(S) * static_cast<std::size_t>(queries.num_queries);
  __builtin_memcpy(queries.max, x.max, bytes);
  __builtin_memcpy(queries.inverse_sum, inverse, bytes);
  const S kept_scale = shape.dropout ? static_cast<S>(shape.dropout->scale) : 1;
  for (int i = 0; i < queries.num_queries; ++i) {
    const bool sees = inverse[i] != 0;
    const S factor = inverse[i] * kept_scale;
    if (S* out = queries.out_sum.data; out) {
      out += i * queries.out_sum.stride;
      for (int d = 0; d < D; ++d) out[d] = sees ? x.acc[i * columns + d] * factor : 0;
      continue;
    }
    T* out = queries.out.data + i * queries.out.stride;
    for (int d = 0; d < D; ++d) out[d] = from_sum<T>(sees ? x.acc[i * columns + d] * factor : 0);
  }
  return !met_nan;
}

// Adds rows of scratch times `factor` to `sums` or, if these are null, writes them to `rows`.
template <typename T>
void store_rows(const Sum<T>* x, Sum<T> factor, int num_rows, int head_dim, int columns,
                Rows<Sum<T>> sums, Rows<T> rows) {
  for (int r = 0; r < num_rows; ++r) {
    const Sum<T>* from = x + std::ptrdiff_t{r} * columns;
    if (sums.data) {
      Sum<T>* row = sums.data + r * sums.stride;
      for (int d = 0; d < head_dim; ++d) row[d] += from[d] * factor;
    } else {
      T* row = rows.data + r * rows.stride;
      for (int d = 0; d < head_dim; ++d) row[d] = from_sum<T>(from[d] * factor);
    }
  }
}

template <typename T>
bool backward(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
              int num_key_tiles, OnNaN on_nan, void* memory) {
  using S = Sum<T>;
  using E = Operand<T>;
  constexpr int kN = kLanes<S>;
  const Scratch<T> x(shape.head_dim, memory);
  const int columns = x.columns, D = shape.head_dim, num_queries = queries.num_queries;
  const int whole_queries = padded_rows<S>(num_queries);
  const S scale = static_cast<S>(shape.scale);
  const S kept_scale = shape.dropout ? static_cast<S>(shape.dropout->scale) : 1;
  S *max = x.max, *inverse_sum = x.sum;
  prefetch_rows<Use::kRead>(queries.d_out, num_queries, D);
  if (num_key_tiles > 0) prefetch_rows<Use::kRead>(keys[0].k, keys[0].num_keys, D);
  load_rows(queries.q, num_queries, D, columns, x.q);
  load_rows(queries.d_out, num_queries, D, columns, x.d_out);
  transpose_matrix(x.q, whole_queries, columns / kNumbers<E>, columns / kNumbers<E>, x.q_t, kTile);
  transpose_matrix(x.d_out, whole_queries, columns / kNumbers<E>, columns / kNumbers<E>, x.d_out_t,
                   kTile);
  const E* q_stacked = stack_rows(x.q, whole_queries, columns, x.q_stacked);
  const E* d_out_stacked = stack_rows(x.d_out, whole_queries, columns, x.d_out_stacked);
  S delta[kTile];
  for (int i = 0; i < kTile; ++i) {
    max[i] = i < num_queries ? queries.max[i] : 0;
    inverse_sum[i] = i < num_queries ? queries.inverse_sum[i] : 0;
    delta[i] = queries.rest && i < num_queries ? queries.rest[i] : 0;
  }
  bool met_nan = has_nan(inverse_sum, kTile);
  if (met_nan && on_nan == OnNaN::kStop) return false;

  // Compute all p and d_p first: delta is the sum of their products, which cancels in p (d_p -
  // delta) as it should where a query sees few keys. (d_out . out is the same sum, but rounds
  // differently.)
  bool k_is_loaded = false;  // of the last tile
  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<S> pair = masked_pair(queries, key, x);
    S *p_t = x.p_t(tile), *d_p_t = x.ds_t(tile);
    const Rows<const E> k = operand_rows(key.k, key.num_keys, D, columns, x.k);
    k_is_loaded = k.data == x.k;
    prefetch_rows<Use::kRead>(key.v, key.num_keys, D);
    multiply_scores(pair, k, x.q_t, D, p_t);
    finish_scores(pair, key.num_keys, scale, p_t);
    const Rows<const E> v = operand_rows(key.v, key.num_keys, D, columns, x.v);
    if (tile + 1 < num_key_tiles) {
      prefetch_rows<Use::kRead>(keys[tile + 1].k, keys[tile + 1].num_keys, D);
    }
    multiply_scores(pair, v, x.d_out_t, D, d_p_t);
    const Bit<S>* kept = draw_kept(shape, queries, pair.queries, key, x.kept(tile));
    for (int i = 0; i < pair.queries; i += kN) {
      const Vector<S> max_i = load(max + i), inverse_i = load(inverse_sum + i);
      Vector<S> sum{};
      for (int panel = 0; panel < pair.end_key(i); panel += kPanel) {
        Vector<S> panel_sum{};
        for (int j = panel; j < panel + kPanel; ++j) {
          const Vector<S> p = exp<S>(load(p_t + j * kTile + i) - max_i) * inverse_i;
          store(p_t + j * kTile + i, p);
          Vector<S> d_p = load(d_p_t + j * kTile + i);
          if (kept) {
            d_p *= keep<S>(Vector<S>{} + kept_scale, kept, j, i);
            store(d_p_t + j * kTile + i, d_p);
          }
          panel_sum += p * d_p;
        }
        sum += panel_sum;
      }
      store(delta + i, load(delta + i) + sum);
    }
  }

  met_nan = met_nan || has_nan(delta, kTile);
  if (met_nan && on_nan == OnNaN::kStop) return false;

  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<S> pair = sizes_of(queries, key);
    S *p_t = x.p_t(tile), *ds_t = x.ds_t(tile);
    E *p_in_rows, *ds_in_rows, *ds_stacked;
    if constexpr (x.kPairs) {
      p_in_rows = x.p_in_rows;
      ds_in_rows = x.ds_in_rows;
      ds_stacked = x.weights_stacked;
    } else {
      p_in_rows = p_t;
      ds_in_rows = ds_stacked = ds_t;
    }
    const Bit<S>* kept = shape.dropout ? x.kept(tile) : nullptr;
    if (!key.d_k_sum.data) {
      prefetch_rows<Use::kWrite>(key.d_v, key.num_keys, D);
      prefetch_rows<Use::kWrite>(key.d_k, key.num_keys, D);
    }
    if (tile + 1 == num_key_tiles) prefetch_rows<Use::kWrite>(queries.d_q, num_queries, D);
    if (num_key_tiles > 1 || !k_is_loaded) load_rows(key.k, key.num_keys, D, columns, x.k);
    for (int i = 0; i < pair.queries; i += kN) {
      const Vector<S> delta_i = load(delta + i);
      for (int j = 0; j < pair.end_key(i); j += kNumbers<E>) {
        Vector<S> ds[kNumbers<E>];
        for (int n = 0; n < kNumbers<E>; ++n) {
          const Vector<S> p = load(p_t + (j + n) * kTile + i);
          ds[n] = p * (load(ds_t + (j + n) * kTile + i) - delta_i);
          const Vector<S> kept_p = keep<S>(p, kept, j + n, i);
          if constexpr (x.kPairs) {
            store_in_row(kept_p, j + n, i, p_in_rows);
            store_in_row(ds[n], j + n, i, ds_in_rows);
            if (key.d_bias) store(ds_t + (j + n) * kTile + i, ds[n]);
          } else if (kept) {
            store(p_t + (j + n) * kTile + i, kept_p);
          }
        }
        store_stacked(ds, j, i, ds_stacked);
      }
    }
    if (key.d_bias) add_bias_gradient(pair, ds_t, num_queries, key);
    multiply_to_keys(pair, p_in_rows, d_out_stacked, columns, x.d_key);
    store_rows(x.d_key, kept_scale, key.num_keys, D, columns, key.d_v_sum, key.d_v);
    multiply_to_keys(pair, ds_in_rows, q_stacked, columns, x.d_key);
    store_rows(x.d_key, scale, key.num_keys, D, columns, key.d_k_sum, key.d_k);
    multiply_to_queries(pair, ds_stacked, stack_rows(x.k, pair.keys, columns, x.key_stacked),
                        columns, x.acc, tile > 0);
  }
  if (num_key_tiles == 0) __builtin_memset(x.acc, 0, sizeof(S) * kTile * columns);
  store_rows(x.acc, scale, num_queries, D, columns, queries.d_q_sum, queries.d_q);
  return !met_nan;
}

template <typename T>
void write_rows(const Sum<T>* sums, int num_rows, int head_dim, Rows<T> rows) {
  store_rows<T>(sums, 1, num_rows, head_dim, head_dim, {}, rows);
}

template <typename T>
void exp_array(const T* x, T* y, std::size_t n) {
  constexpr std::size_t kN = kLanes<T>;
  for (std::size_t i = 0; i < n; i += kN) {
    const std::size_t count = n - i < kN ? n - i : kN;
    Vector<T> v{};
    for (std::size_t lane = 0; lane < count; ++lane) v[lane] = x[i + lane];
    v = exp<T>(v);
    for (std::size_t lane = 0; lane < count; ++lane) y[i + lane] = v[lane];
  }
}

template <typename T>
constexpr TileKernels<T> kKernels{&Scratch<T>::bytes, &forward<T>, &backward<T>, &write_rows<T>,
                                  &exp_array<Sum<T>>};

}  // namespace
}  // namespace birkhoff
