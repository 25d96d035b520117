// The loop of cpu_loop.h, compiled once for each instruction set.
//
// Scores are stored transposed, s_t[j][i], with one query in each lane. The softmax over keys then
// runs down the rows and never across lanes, and only q and d_out are transposed, once for all key
// tiles. Every product is c[m][n] (+)= sum_k a(m, k) b[k][n] over scratch. Rows are copied to
// scratch, except an `a` that is read only once: in a [B, L, H, D] tensor they lie a power of two
// apart and would evict one another from L1. One thread owns a whole call.
//
// With vdpbf16ps and AMX, k counts pairs of bf16, and operands are laid out in pairs. Without them,
// bf16 is widened to float on the way to scratch, and the loop is the one for float.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/tile_attention/cpu_distances.h"
#include "attention/kernels/tile_attention/cpu_dropout.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "attention/kernels/tile_attention/cpu_pair.h"

namespace birkhoff {
namespace {

template <typename T>
bool forward(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
             int num_key_tiles, void* memory) {
  using S = Sum<T>;
  using E = Operand<T>;
  constexpr int kN = kLanes<S>;
  constexpr S kInfinity = __builtin_inf();
  const Scratch<T> x(shape, memory);
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
  const TileDistances<T>* relative = queries.relative;
  const bool relative_values = relative && relative->values;
  const DistanceScratch<T>& distances = x.distances;
  const TableProducts<T> tables(shape, columns, distances.columns);
  if (relative) {
    const int rows = padded_rows<S>(queries.num_queries);
    tables.multiply(wide_rows(x.q, rows, columns, distances.q), rows, relative->keys_t,
                    relative->bias, scale, distances.of_keys);
    __builtin_memset(distances.of_values, 0, sizeof(S) * kTile * distances.columns);
  }
  for (int i = 0; i < kTile; ++i) {
    x.max[i] = -kInfinity;
    x.sum[i] = 0;
  }

  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<S> pair = masked_pair(queries, key, D, x);
    const AmxRegisters amx(pair.amx_depth);
    const Rows<const E> k = operand_rows(key.k, key.num_keys, D, columns, x.k, key.weight);
    prefetch_rows<Use::kRead>(key.v, key.num_keys, D);
    multiply_scores(pair, k, x.q_t, D, s_t);
    load_rows(key.v, key.num_keys, D, columns, x.v, key.weight);
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
            if (x.kPairs && relative_values) store(s_t + (j + n) * kTile + i, p[n]);
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
    if (relative_values) {
      if (tile > 0) scale_rows(factor, queries.num_queries, distances);
      if (key.positions) {
        collect_tile(s_t, queries, key, x.added_rows, distances.of_values, distances.columns);
      }
    }
    multiply_to_queries(pair, weights, stack_rows(x.v, pair.keys, columns, x.key_stacked), columns,
                        x.acc, tile > 0, x.p_in_rows);
  }
  if (num_key_tiles == 0) __builtin_memset(x.acc, 0, sizeof(S) * kTile * columns);
  if (relative_values) {
    tables.add_rows(distances.of_values, padded_rows<S>(queries.num_queries), relative->values,
                    x.acc);
  }

  // A NaN logit makes its query's sum NaN. A NaN value makes at least the last row NaN: the last
  // row multiplies all values that any row multiplies.
  const bool met_nan =
      has_nan(x.sum, kTile) ||
      (num_key_tiles > 0 && has_nan(x.acc + (queries.num_queries - 1) * columns, columns));
  S inverse[kTile], to_out[kTile];
  for (int i = 0; i < kTile; i += kN) {
    Vector<S> sum = load(x.sum + i), max = load(x.max + i), f = Vector<S>{} + 1;
    if (queries.sink) {
      const Vector<S> sink = Vector<S>{} + *queries.sink;
      const Vector<S> largest = max > sink ? max : sink;
      f = exp<S>(max - largest);
      sum = sum != 0 ? sum * f + exp<S>(sink - largest) : sum;
      max = largest;
    }
    const Vector<S> z = sum != 0 ? 1 / sum : Vector<S>{};
    store(inverse + i, z);
    store(to_out + i, queries.sink ? z * f : z);
    store(x.max + i, sum > 0 ? max : Vector<S>{});
  }
  const std::size_t bytes = sizeof(S) * static_cast<std::size_t>(queries.num_queries);
  __builtin_memcpy(queries.max, x.max, bytes);
  __builtin_memcpy(queries.inverse_sum, inverse, bytes);
  const S kept_scale = shape.dropout ? static_cast<S>(shape.dropout->scale) : 1;
  for (int i = 0; i < queries.num_queries; ++i) {
    const bool sees = inverse[i] != 0;
    const S factor = to_out[i] * kept_scale;
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

// The sum over all rows and columns of x [num_rows, columns] times the rows.
template <typename T>
double dot_rows(const Sum<T>* x, Rows<const T> rows, int num_rows, int head_dim, int columns) {
  constexpr int kParts = 4 * kLanes<Sum<T>>;  // which the compiler adds in parallel
  Sum<T> parts[kParts] = {};
  for (int r = 0; r < num_rows; ++r) {
    const Sum<T>* x_row = x + std::ptrdiff_t{r} * columns;
    const T* row = rows.data + r * rows.stride;
    int d = 0;
    for (; d + kParts <= head_dim; d += kParts) {
      for (int p = 0; p < kParts; ++p) parts[p] += x_row[d + p] * to_sum(row[d + p]);
    }
    for (int p = 0; d + p < head_dim; ++p) parts[p] += x_row[d + p] * to_sum(row[d + p]);
  }
  double sum = 0;
  for (const Sum<T> part : parts) sum += part;
  return sum;
}

// Adds x [num_keys, columns] times `factor`, the gradient of a tile's weighted rows, to the
// gradients of the rows and of the weight.
template <typename T>
void finish_key_gradient(const KeyTile<T>& key, Sum<T> factor, Rows<const T> rows, int head_dim,
                         int columns, const Sum<T>* x, Rows<Sum<T>> d_sums, Rows<T> d_rows) {
  store_rows(x, factor * key.weight, key.num_keys, head_dim, columns, d_sums, d_rows);
  if (key.d_weight) *key.d_weight += factor * dot_rows(x, rows, key.num_keys, head_dim, columns);
}

template <typename T>
bool backward(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
              int num_key_tiles, OnNaN on_nan, void* memory) {
  using S = Sum<T>;
  using E = Operand<T>;
  constexpr int kN = kLanes<S>;
  const Scratch<T> x(shape, memory);
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
  const TileDistances<T>* relative = queries.relative;
  const DistanceScratch<T>& distances = x.distances;
  const TableProducts<T> tables(shape, columns, distances.columns);
  const S *wide_q = nullptr, *wide_d_out = nullptr;
  if (relative) {
    wide_q = wide_rows(x.q, whole_queries, columns, distances.q);
    wide_d_out = wide_rows(x.d_out, whole_queries, columns, distances.d_out);
    tables.multiply(wide_q, whole_queries, relative->keys_t, relative->bias, scale,
                    distances.of_keys);
    if (relative->values) {
      tables.multiply(wide_d_out, whole_queries, relative->values_t, nullptr, 1,
                      distances.of_values);
    }
  }
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
    const Pair<S> pair = masked_pair(queries, key, D, x);
    const AmxRegisters amx(pair.amx_depth);
    S *p_t = x.p_t(tile), *d_p_t = x.ds_t(tile);
    const Rows<const E> k = operand_rows(key.k, key.num_keys, D, columns, x.k, key.weight);
    k_is_loaded = k.data == x.k;
    prefetch_rows<Use::kRead>(key.v, key.num_keys, D);
    multiply_scores(pair, k, x.q_t, D, p_t);
    finish_scores(pair, key.num_keys, scale, p_t);
    const Rows<const E> v = operand_rows(key.v, key.num_keys, D, columns, x.v, key.weight);
    if (tile + 1 < num_key_tiles) {
      prefetch_rows<Use::kRead>(keys[tile + 1].k, keys[tile + 1].num_keys, D);
    }
    multiply_scores(pair, v, x.d_out_t, D, d_p_t);
    if (relative && relative->values && key.positions) {
      add_distances_t(distances.of_values, distances.columns, queries, key, x.added_rows, x.added_t,
                      d_p_t);
    }
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
  if (queries.d_sink) {
    for (int i = 0; i < num_queries; ++i) {
      if (inverse_sum[i] == 0) continue;  // it sees no key, and its maximum has no meaning
      Vector<S> distance{};
      distance[0] = *queries.sink - max[i];
      *queries.d_sink -= exp<S>(distance)[0] * inverse_sum[i] * delta[i];
    }
  }
  if (relative) {
    for (S* sums : {distances.of_keys, distances.of_values}) {
      __builtin_memset(sums, 0, sizeof(S) * kTile * distances.columns);
    }
  }

  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<S> pair = sizes_of(queries, key, D);
    const AmxRegisters amx(pair.amx_depth);
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
    prefetch_rows<Use::kWrite>(key.d_v, key.num_keys, D);
    prefetch_rows<Use::kWrite>(key.d_k, key.num_keys, D);
    if (tile + 1 == num_key_tiles) prefetch_rows<Use::kWrite>(queries.d_q, num_queries, D);
    if (num_key_tiles > 1 || !k_is_loaded) {
      load_rows(key.k, key.num_keys, D, columns, x.k, key.weight);
    }
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
            if (key.d_bias || relative) store(ds_t + (j + n) * kTile + i, ds[n]);
            if (kept && relative) store(p_t + (j + n) * kTile + i, kept_p);
          } else if (kept) {
            store(p_t + (j + n) * kTile + i, kept_p);
          }
        }
        store_stacked(ds, j, i, ds_stacked);
      }
    }
    if (key.d_bias) add_bias_gradient(pair, ds_t, num_queries, key);
    if (relative && key.positions) {
      collect_tile(ds_t, queries, key, x.added_rows, distances.of_keys, distances.columns);
      if (relative->values) {
        collect_tile(p_t, queries, key, x.added_rows, distances.of_values, distances.columns);
      }
    }
    multiply_to_keys(pair, p_in_rows, d_out_stacked, columns, x.d_key);
    finish_key_gradient(key, kept_scale, key.v, D, columns, x.d_key, key.d_v_sum, key.d_v);
    multiply_to_keys(pair, ds_in_rows, q_stacked, columns, x.d_key);
    finish_key_gradient(key, scale, key.k, D, columns, x.d_key, key.d_k_sum, key.d_k);
    multiply_to_queries(pair, ds_stacked, stack_rows(x.k, pair.keys, columns, x.key_stacked),
                        columns, x.acc, tile > 0, x.p_in_rows);
  }
  if (num_key_tiles == 0) __builtin_memset(x.acc, 0, sizeof(S) * kTile * columns);
  if (relative) {
    tables.add_rows(distances.of_keys, whole_queries, relative->keys, x.acc);
    tables.add_gradient(distances.of_keys, num_queries, wide_q, relative->d_keys);
    if (relative->bias) {
      tables.add_rows_to_bias(distances.of_keys, num_queries, relative->d_bias);
    }
    if (relative->values) {
      tables.add_gradient(distances.of_values, num_queries, wide_d_out, relative->d_values);
    }
  }
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
  std::size_t i = 0;
  for (; i + kN <= n; i += kN) store(y + i, exp<T>(load(x + i)));
  if (i == n) return;
  Vector<T> rest{};
  __builtin_memcpy(&rest, x + i, (n - i) * sizeof(T));
  rest = exp<T>(rest);
  __builtin_memcpy(y + i, &rest, (n - i) * sizeof(T));
}

template <typename T>
constexpr TileKernels<T> kKernels{&Scratch<T>::bytes, &forward<T>, &backward<T>, &write_rows<T>,
                                  &exp_array<Sum<T>>};

}  // namespace
}  // namespace birkhoff
