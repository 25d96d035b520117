// The loop of tile_attention.h, compiled once for each instruction set.
//
// Scores are held transposed, s_t[j][i] with a query in each lane: the softmax over keys then runs
// down the rows and never across lanes, and only q and d_out are transposed, once for all key
// tiles. Every product is c[m][n] (+)= sum_k a(m, k) b[k][n] over scratch: rows are copied there
// first, because rows of a [B, L, H, D] tensor lie a power of two apart and would evict one another
// from L1. One thread owns a whole call.
#pragma once

#include "attention/tile_attention.h"
#include "attention/tile_vector.h"

namespace birkhoff {
namespace {

constexpr int kPanel = 8;  // rows of a register block; tiles are padded to a multiple with zeros

inline int min_of(int a, int b) { return a < b ? a : b; }
inline int round_up(int x, int step) { return (x + step - 1) / step * step; }
inline int round_down(int x, int step) { return x / step * step; }

// c (+)= a b for kRows rows and kVectors vectors of columns, accumulated in registers.
template <typename T, int kRows, int kVectors>
inline void multiply_block(const T* a, std::ptrdiff_t a_row, std::ptrdiff_t a_depth, const T* b,
                           std::ptrdiff_t b_depth, int depth, T* c, std::ptrdiff_t c_row,
                           bool accumulate) {
  constexpr int kN = kLanes<T>;
  Vector<T> sum[kRows][kVectors] = {};
  for (int k = 0; k < depth; ++k) {
    Vector<T> b_k[kVectors];
    for (int n = 0; n < kVectors; ++n) b_k[n] = load(b + k * b_depth + n * kN);
    for (int m = 0; m < kRows; ++m) {
      const T a_mk = a[m * a_row + k * a_depth];
      for (int n = 0; n < kVectors; ++n) sum[m][n] += b_k[n] * a_mk;
    }
  }
  // What c holds is added last: sums of tiles, each summed for itself, round less than one long
  // sum.
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVectors; ++n) {
      T* c_mn = c + m * c_row + n * kN;
      store(c_mn, accumulate ? load(c_mn) + sum[m][n] : sum[m][n]);
    }
  }
}

// Vectors of columns in a register block of half a panel's rows: accumulators, one row of b and a
// broadcast fill 32 registers with AVX-512, else 16.
constexpr int kMostVectors = kVectorBytes == 64 ? 4 : 3;

// kPanel rows of c, any number of columns that is a multiple of the lanes.
template <typename T>
void multiply_panel(const T* a, std::ptrdiff_t a_row, std::ptrdiff_t a_depth, const T* b,
                    std::ptrdiff_t b_depth, int depth, T* c, std::ptrdiff_t c_row, int columns,
                    bool accumulate) {
  constexpr int kN = kLanes<T>, kHalf = kPanel / 2;
  const auto halves = [&]<int kVectors>() {
    for (int m = 0; m < kPanel; m += kHalf) {
      multiply_block<T, kHalf, kVectors>(a + m * a_row, a_row, a_depth, b, b_depth, depth,
                                         c + m * c_row, c_row, accumulate);
    }
  };
  while (columns > 0) {
    int vectors = min_of(columns / kN, kMostVectors);
    if (vectors == 4) {
      if constexpr (kMostVectors >= 4) halves.template operator()<4>();
    } else if (vectors == 3) {
      halves.template operator()<3>();
    } else if (vectors == 2) {
      halves.template operator()<2>();
    } else {
      multiply_block<T, kPanel, 1>(a, a_row, a_depth, b, b_depth, depth, c, c_row, accumulate);
    }
    columns -= vectors * kN;
    b += vectors * kN;
    c += vectors * kN;
  }
}

// Scratch matrices of one call. D is padded to whole vectors, tiles to kTile rows.
template <typename T>
struct Scratch {
  int columns;
  T *q, *q_t, *d_out, *d_out_t, *k, *v, *acc, *d_key;  // [kTile, columns], the q_t [columns, kTile]
  T *hidden_rows, *hidden_t;                           // [kTile, kTile]
  T *max, *sum;                                        // [kTile]
  T* pairs;                                            // p_t and ds_t of each key tile

  T* p_t(int tile) const { return pairs + 2 * tile * kTile * kTile; }
  T* ds_t(int tile) const { return p_t(tile) + kTile * kTile; }

  static int padded(int head_dim) { return round_up(head_dim, 64 / static_cast<int>(sizeof(T))); }
  static std::size_t bytes(int head_dim, int num_key_tiles) {
    const int wide = kTile * padded(head_dim), square = kTile * kTile;
    return static_cast<std::size_t>(8 * wide + (2 + 2 * num_key_tiles) * square + 2 * kTile) *
           sizeof(T);
  }

  Scratch(int head_dim, void* memory) : columns(padded(head_dim)) {
    T* next = static_cast<T*>(memory);
    const auto take = [&](int count) {
      T* taken = next;
      next += count;
      return taken;
    };
    for (T** wide : {&q, &q_t, &d_out, &d_out_t, &k, &v, &acc, &d_key}) {
      *wide = take(kTile * columns);
    }
    for (T** square : {&hidden_rows, &hidden_t}) *square = take(kTile * kTile);
    for (T** vector : {&max, &sum}) *vector = take(kTile);
    pairs = next;
  }
};

// x [round_up(rows), columns] = the rows, padded with zeros.
template <typename T>
void load_rows(Rows<const T> rows, int num_rows, int head_dim, int columns, T* x) {
  const int padded_rows = round_up(num_rows, kPanel > kLanes<T> ? kPanel : kLanes<T>);
  for (int r = 0; r < num_rows; ++r) {
    const T* row = rows.data + r * rows.stride;
    for (int d = 0; d < head_dim; ++d) x[r * columns + d] = row[d];
    for (int d = head_dim; d < columns; ++d) x[r * columns + d] = 0;
  }
  for (int i = num_rows * columns; i < padded_rows * columns; ++i) x[i] = 0;
}

// x_t [columns, kTile] = x [rows, columns] transposed, for whole vectors of both.
template <typename T>
void transpose_tile(const T* x, int rows, int columns, T* x_t) {
  constexpr int kN = kLanes<T>;
  for (int r = 0; r < rows; r += kN) {
    for (int c = 0; c < columns; c += kN) {
      Vector<T> block[kN];
      for (int i = 0; i < kN; ++i) block[i] = load(x + (r + i) * columns + c);
      transpose<T>(block);
      for (int i = 0; i < kN; ++i) store(x_t + (c + i) * kTile + r, block[i]);
    }
  }
}

// One (query tile, key tile) pair: the sizes, and which part of the products a causal tile needs.
template <typename T>
struct Pair {
  int queries, keys;  // padded to whole vectors and panels
  bool causal;
  const T* hidden_t;  // added to s_t: 0 or -infinity, rows `hidden_stride` apart; null: nothing
  std::ptrdiff_t hidden_stride;

  // Queries before this one see no key of key j's panel, and no score of theirs is computed.
  int first_query(int j) const { return causal ? round_down(round_down(j, kPanel), kLanes<T>) : 0; }
  // Keys from this one on are seen by no query of the vector that starts at query i.
  int end_key(int i) const { return causal ? min_of(keys, round_up(i + kLanes<T>, kPanel)) : keys; }
};

template <typename T>
Pair<T> sizes_of(const QueryTile<T>& queries, const KeyTile<T>& keys) {
  constexpr int kStep = kPanel > kLanes<T> ? kPanel : kLanes<T>;
  return {round_up(queries.num_queries, kStep), round_up(keys.num_keys, kPanel), keys.causal,
          nullptr, 0};
}

// The same with its mask, built in scratch.
template <typename T>
Pair<T> masked_pair(const QueryTile<T>& queries, const KeyTile<T>& keys, const Scratch<T>& x) {
  constexpr T kHidden = -__builtin_inf();
  Pair<T> pair = sizes_of(queries, keys);
  if (keys.legal) {
    pair.hidden_t = x.hidden_t;
    const auto hidden = [&](int i, int j) {
      const bool legal = i >= queries.num_queries || j >= keys.num_keys ||
                         keys.legal[i * keys.legal_query_stride + j * keys.legal_key_stride];
      return legal ? T{0} : kHidden;
    };
    if (keys.legal_key_stride == 0) {
      for (int i = 0; i < pair.queries; ++i) x.hidden_t[i] = hidden(i, 0);
    } else {
      pair.hidden_stride = kTile;
      for (int i = 0; i < pair.queries; ++i) {
        for (int j = 0; j < kTile; ++j) x.hidden_rows[i * kTile + j] = hidden(i, j);
      }
      transpose_tile(x.hidden_rows, pair.queries, kTile, x.hidden_t);
    }
  }
  return pair;
}

// s_t [keys, queries] = sum_d k_jd q_id, where the pair needs it. Summed in parts, because errors
// of logits are what errors of all else come from when logits are large.
template <typename T>
void multiply_scores(const Pair<T>& pair, const T* k, const T* q_t, int head_dim, int columns,
                     T* s_t) {
  constexpr int kPart = 16;
  for (int j = 0; j < pair.keys; j += kPanel) {
    const int first = pair.first_query(j);
    for (int d = 0; d < head_dim; d += kPart) {
      multiply_panel(k + j * columns + d, columns, 1, q_t + d * kTile + first, kTile,
                     min_of(kPart, head_dim - d), s_t + j * kTile + first, kTile,
                     pair.queries - first, d > 0);
    }
  }
}

// y [queries, columns] (+)= sum_j w_t[j][i] x_jd.
template <typename T>
void multiply_to_queries(const Pair<T>& pair, const T* w_t, const T* x, int columns, T* y,
                         bool accumulate) {
  for (int i = 0; i < pair.queries; i += kPanel) {
    const int depth = pair.causal ? min_of(pair.keys, i + kPanel) : pair.keys;
    multiply_panel(w_t + i, 1, kTile, x, columns, depth, y + i * columns, columns, columns,
                   accumulate);
  }
}

// y [keys, columns] = sum_i w_t[j][i] x_id.
template <typename T>
void multiply_to_keys(const Pair<T>& pair, const T* w_t, const T* x, int columns, T* y) {
  for (int j = 0; j < pair.keys; j += kPanel) {
    const int first = pair.causal ? j : 0;
    multiply_panel(w_t + j * kTile + first, kTile, 1, x + first * columns, columns,
                   pair.queries - first, y + j * columns, columns, columns, false);
  }
}

// The lanes of s_t[j][i..], scaled, -infinity where the query may not see the key.
template <typename T>
inline Vector<T> masked_scores(const Pair<T>& pair, int num_keys, T scale, const T* s_t, int j,
                               int i) {
  constexpr T kHidden = -__builtin_inf();
  if (j >= num_keys) return Vector<T>{} + kHidden;
  Vector<T> s = load(s_t + j * kTile + i) * scale;
  if (pair.hidden_t) s += load(pair.hidden_t + j * pair.hidden_stride + i);
  if (pair.causal && i < j) {
    Bits<T> query;
    for (int lane = 0; lane < kLanes<T>; ++lane) query[lane] = i + lane;
    s = query < j ? Vector<T>{} + kHidden : s;
  }
  return s;
}

template <typename T>
void forward(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
             int num_key_tiles, void* memory) {
  constexpr int kN = kLanes<T>;
  constexpr T kInfinity = __builtin_inf();
  const Scratch<T> x(shape.head_dim, memory);
  const int columns = x.columns, D = shape.head_dim;
  const T scale = static_cast<T>(shape.scale);
  T* s_t = x.p_t(0);
  load_rows(queries.q, queries.num_queries, D, columns, x.q);
  transpose_tile(x.q, round_up(queries.num_queries, kN), columns, x.q_t);
  for (int i = 0; i < kTile; ++i) {
    x.max[i] = -kInfinity;
    x.sum[i] = 0;
  }

  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<T> pair = masked_pair(queries, key, x);
    load_rows(key.k, key.num_keys, D, columns, x.k);
    load_rows(key.v, key.num_keys, D, columns, x.v);
    multiply_scores(pair, x.k, x.q_t, D, columns, s_t);
    T factor[kTile];  // of what earlier tiles gave, for the new maximum
    for (int i = 0; i < pair.queries; i += kN) {
      const int end_key = pair.end_key(i);
      const Vector<T> old_max = load(x.max + i);
      Vector<T> max = old_max;
      for (int j = 0; j < end_key; ++j) {
        const Vector<T> s = masked_scores(pair, key.num_keys, scale, s_t, j, i);
        max = s > max ? s : max;
        store(s_t + j * kTile + i, s);
      }
      // A query that has seen no key keeps the maximum -infinity and subtracts 0.
      const Vector<T> shift = max == -kInfinity ? Vector<T>{} : max;
      Vector<T> sum{};
      for (int panel = 0; panel < end_key; panel += kPanel) {
        Vector<T> panel_sum{};
        for (int j = panel; j < panel + kPanel; ++j) {
          const Vector<T> p = exp<T>(load(s_t + j * kTile + i) - shift);
          panel_sum += p;
          store(s_t + j * kTile + i, p);
        }
        sum += panel_sum;
      }
      const Vector<T> f = exp<T>(old_max - shift);
      store(factor + i, f);
      store(x.max + i, max);
      store(x.sum + i, load(x.sum + i) * f + sum);
    }
    if (tile > 0) {
      for (int i = 0; i < queries.num_queries; ++i) {
        for (int d = 0; d < columns; ++d) x.acc[i * columns + d] *= factor[i];
      }
    }
    multiply_to_queries(pair, s_t, x.v, columns, x.acc, tile > 0);
  }

  for (int i = 0; i < queries.num_queries; ++i) {
    const bool sees = x.sum[i] > 0;
    const T inverse = sees ? 1 / x.sum[i] : 0;
    queries.max[i] = sees ? x.max[i] : 0;
    queries.inverse_sum[i] = inverse;
    T* out = queries.out.data + i * queries.out.stride;
    for (int d = 0; d < D; ++d) out[d] = sees ? x.acc[i * columns + d] * inverse : 0;
  }
}

// Writes or adds rows of scratch to a gradient.
template <typename T>
void store_rows(const T* x, int num_rows, int head_dim, int columns, bool accumulate,
                Rows<T> rows) {
  for (int r = 0; r < num_rows; ++r) {
    T* row = rows.data + r * rows.stride;
    const T* from = x + r * columns;
    if (accumulate) {
      for (int d = 0; d < head_dim; ++d) row[d] += from[d];
    } else {
      for (int d = 0; d < head_dim; ++d) row[d] = from[d];
    }
  }
}

template <typename T>
void backward(const TileShape& shape, const QueryTile<T>& queries, const KeyTile<T>* keys,
              int num_key_tiles, void* memory) {
  constexpr int kN = kLanes<T>;
  const Scratch<T> x(shape.head_dim, memory);
  const int columns = x.columns, D = shape.head_dim, num_queries = queries.num_queries;
  const int whole_queries = round_up(num_queries, kN);
  const T scale = static_cast<T>(shape.scale);
  T *max = x.max, *inverse_sum = x.sum;
  load_rows(queries.q, num_queries, D, columns, x.q);
  load_rows(queries.d_out, num_queries, D, columns, x.d_out);
  transpose_tile(x.q, whole_queries, columns, x.q_t);
  transpose_tile(x.d_out, whole_queries, columns, x.d_out_t);
  T delta[kTile];
  for (int i = 0; i < kTile; ++i) {
    max[i] = i < num_queries ? queries.max[i] : 0;
    inverse_sum[i] = i < num_queries ? queries.inverse_sum[i] : 0;
    delta[i] = 0;
  }

  // All p and d_p first: delta is their product's sum, which cancels in p (d_p - delta) as it
  // should where a query sees few keys. (d_out . out is the same sum, rounded otherwise.)
  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<T> pair = masked_pair(queries, key, x);
    T *p_t = x.p_t(tile), *d_p_t = x.ds_t(tile);
    load_rows(key.k, key.num_keys, D, columns, x.k);
    load_rows(key.v, key.num_keys, D, columns, x.v);
    multiply_scores(pair, x.k, x.q_t, D, columns, p_t);
    multiply_scores(pair, x.v, x.d_out_t, D, columns, d_p_t);
    for (int i = 0; i < pair.queries; i += kN) {
      const Vector<T> max_i = load(max + i), inverse_i = load(inverse_sum + i);
      Vector<T> sum{};
      for (int panel = 0; panel < pair.end_key(i); panel += kPanel) {
        Vector<T> panel_sum{};
        for (int j = panel; j < panel + kPanel; ++j) {
          const Vector<T> s = masked_scores(pair, key.num_keys, scale, p_t, j, i);
          const Vector<T> p = exp<T>(s - max_i) * inverse_i;
          store(p_t + j * kTile + i, p);
          panel_sum += p * load(d_p_t + j * kTile + i);
        }
        sum += panel_sum;
      }
      store(delta + i, load(delta + i) + sum);
    }
  }

  for (int tile = 0; tile < num_key_tiles; ++tile) {
    const KeyTile<T>& key = keys[tile];
    const Pair<T> pair = sizes_of(queries, key);
    T *p_t = x.p_t(tile), *ds_t = x.ds_t(tile);
    if (num_key_tiles > 1) load_rows(key.k, key.num_keys, D, columns, x.k);
    for (int i = 0; i < pair.queries; i += kN) {
      const Vector<T> delta_i = load(delta + i);
      for (int j = 0; j < pair.end_key(i); ++j) {
        const Vector<T> d_p = load(ds_t + j * kTile + i);
        store(ds_t + j * kTile + i, load(p_t + j * kTile + i) * (d_p - delta_i) * scale);
      }
    }
    multiply_to_keys(pair, p_t, x.d_out, columns, x.d_key);
    store_rows(x.d_key, key.num_keys, D, columns, key.accumulate, key.d_v);
    multiply_to_keys(pair, ds_t, x.q, columns, x.d_key);
    store_rows(x.d_key, key.num_keys, D, columns, key.accumulate, key.d_k);
    multiply_to_queries(pair, ds_t, x.k, columns, x.acc, tile > 0);
  }
  if (num_key_tiles == 0) __builtin_memset(x.acc, 0, sizeof(T) * kTile * columns);
  store_rows(x.acc, num_queries, D, columns, false, queries.d_q);
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
constexpr TileKernels<T> kKernels{&Scratch<T>::bytes, &forward<T>, &backward<T>, &exp_array<T>};

}  // namespace
}  // namespace birkhoff
