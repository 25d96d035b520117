// Relative positions in the tile kernels: sums over the keys at each distance from a query. A row
// of distances belongs to one query and has a column for each row of the tables. Included by files
// that are compiled with different flags from the rest: nothing here has external linkage.
// Functions are not inlined, so that a loop without relative positions stays as it is.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {
namespace {

// Scratch for the rows of distances of one tile, [kTile, columns].
template <typename T>
struct DistanceScratch {
  using S = Sum<T>;

  int columns = 0;  // padded_columns<S>(num_distances); 0 without distances
  S *of_keys = nullptr, *of_values = nullptr;
  S *q = nullptr, *d_out = nullptr;  // [kTile, padded_columns<T>(head_dim)]; only for pairs

  static std::ptrdiff_t numbers(const TileShape& shape) {
    if (shape.num_distances == 0) return 0;
    const int wide = kTakesPairs<T> ? 2 * padded_columns<T>(shape.head_dim) : 0;
    return kTile * (2 * padded_columns<S>(shape.num_distances) + wide);
  }

  DistanceScratch() = default;
  DistanceScratch(const TileShape& shape, S* memory) {
    if (shape.num_distances == 0) return;
    columns = padded_columns<S>(shape.num_distances);
    of_keys = memory;
    of_values = of_keys + kTile * columns;
    q = of_values + kTile * columns;
    d_out = q + kTile * padded_columns<T>(shape.head_dim);
  }
};

// Rows of scratch as elements: x itself, or the elements of the pairs in x, in `wide`. [kTile,
// columns].
template <typename S>
inline const S* wide_rows(const S* x, int, int, S*) {
  return x;
}
inline const float* wide_rows(const Bf16Pair* x, int rows, int columns, float* wide) {
  for (int i = 0; i < rows * columns / 2; ++i) {
    wide[2 * i] = to_sum(static_cast<Bf16>(x[i] & 0xffff));
    wide[2 * i + 1] = to_sum(static_cast<Bf16>(static_cast<std::uint32_t>(x[i]) >> 16));
  }
  return wide;
}

// The products of rows x [rows, x_columns] and rows of distances w [rows, w_columns] with a table.
template <typename T>
struct TableProducts {
  using S = Sum<T>;
  int head_dim, num_distances, x_columns, w_columns;

  TableProducts(const TileShape& shape, int row_columns, int distance_columns)
      : head_dim(shape.head_dim),
        num_distances(shape.num_distances),
        x_columns(row_columns),
        w_columns(distance_columns) {}

  // w = factor (x table_t + bias); bias [num_distances] may be null.
  [[gnu::noinline]] void multiply(const S* x, int rows, const S* table_t, const S* bias, S factor,
                                  S* w) const {
    for (int i = 0; i < rows; i += kPanel) {
      multiply_panel<Summation::kInParts>(x + i * x_columns, x_columns, 1, table_t,
                                          whole_columns<T>(num_distances), head_dim,
                                          w + i * w_columns, w_columns, w_columns, false);
    }
    if (bias) {
      for (int i = 0; i < rows; ++i) {
        for (int r = 0; r < num_distances; ++r) w[i * w_columns + r] += bias[r];
      }
    }
    for (int n = 0; n < rows * w_columns; ++n) w[n] *= factor;
  }
  // x += w table.
  [[gnu::noinline]] void add_rows(const S* w, int rows, const S* table, S* x) const {
    for (int i = 0; i < rows; i += kPanel) {
      multiply_panel(w + i * w_columns, w_columns, 1, table, whole_columns<T>(head_dim),
                     num_distances, x + i * x_columns, x_columns, x_columns, true);
    }
  }
  // d_table += w^T x.
  [[gnu::noinline]] void add_gradient(const S* w, int rows, const S* x, S* d_table) const {
    for (int r = 0; r < w_columns; r += kPanel) {
      multiply_panel(w + r, 1, w_columns, x, x_columns, rows,
                     d_table + r * whole_columns<T>(head_dim), whole_columns<T>(head_dim),
                     x_columns, true);
    }
  }
  // d_bias += the sum of the rows of w.
  [[gnu::noinline]] void add_rows_to_bias(const S* w, int rows, S* d_bias) const {
    for (int i = 0; i < rows; ++i) {
      for (int r = 0; r < num_distances; ++r) d_bias[r] += w[i * w_columns + r];
    }
  }
};

// row[j] = of_distance[..] for the distances of keys j < num_keys from the query at `position`.
template <typename S>
void spread_distances(const S* of_distance, int least, int last_row, std::int32_t position,
                      const std::int32_t* key_positions, int num_keys, S* row) {
  for (int j = 0; j < num_keys; ++j) {
    int r = key_positions[j] - position - least;
    r = r < 0 ? 0 : r;
    r = r > last_row ? last_row : r;
    row[j] = of_distance[r];
  }
}

template <typename S>
S sum_of(const S* x, int count) {
  Vector<S> sums{};
  int i = 0;
  for (; i + kLanes<S> <= count; i += kLanes<S>) sums += load(x + i);
  S sum = 0;
  for (int lane = 0; lane < kLanes<S>; ++lane) sum += sums[lane];
  for (; i < count; ++i) sum += x[i];
  return sum;
}

// of_distance[..] += row[j] for keys j < num_keys. Leading and trailing keys that are clipped to
// one distance are summed first: additions to one element in memory wait for each other.
template <typename S>
void collect_distances(const S* row, int least, int last_row, std::int32_t position,
                       const std::int32_t* key_positions, int num_keys, S* of_distance) {
  const auto row_of = [&](int j) { return key_positions[j] - position - least; };
  int first = 0, end = num_keys;
  while (first < num_keys && row_of(first) <= 0) ++first;
  while (end > first && row_of(end - 1) >= last_row) --end;
  if (first > 0) of_distance[0] += sum_of(row, first);
  if (end < num_keys) of_distance[last_row] += sum_of(row + end, num_keys - end);
  for (int j = first; j < end; ++j) {
    int r = row_of(j);
    r = r < 0 ? 0 : r;
    r = r > last_row ? last_row : r;
    of_distance[r] += row[j];
  }
}

// rows [kTile, kTile] = the values of each query's keys, from its row of distances; 0 in the
// padding.
template <typename T>
[[gnu::noinline]] void spread_tile(const Sum<T>* of_distance, int distances,
                                   const QueryTile<T>& queries, const KeyTile<T>& keys,
                                   Sum<T>* rows) {
  const TileDistances<T>& relative = *queries.relative;
  for (int i = 0; i < kTile; ++i) {
    const int num_keys = i < queries.num_queries ? keys.num_keys : 0;
    if (num_keys > 0) {
      spread_distances(of_distance + i * distances, relative.least, relative.num_distances - 1,
                       queries.positions[i], keys.positions, num_keys, rows + i * kTile);
    }
    for (int j = num_keys; j < kTile; ++j) rows[i * kTile + j] = 0;
  }
}

// x_t [keys, queries] += the same. `rows` and `rows_t` are scratch, [kTile, kTile].
template <typename T>
[[gnu::noinline]] void add_distances_t(const Sum<T>* of_distance, int distances,
                                       const QueryTile<T>& queries, const KeyTile<T>& keys,
                                       Sum<T>* rows, Sum<T>* rows_t, Sum<T>* x_t) {
  using S = Sum<T>;
  spread_tile(of_distance, distances, queries, keys, rows);
  transpose_matrix(rows, padded_rows<S>(queries.num_queries), kTile, kTile, rows_t, kTile);
  for (int x = 0; x < kTile * keys.num_keys; x += kLanes<S>) {
    store(x_t + x, load(x_t + x) + load(rows_t + x));
  }
}

// of_values *= factor_i in each row i.
template <typename T>
[[gnu::noinline]] void scale_rows(const Sum<T>* factor, int num_queries,
                                  const DistanceScratch<T>& distances) {
  for (int i = 0; i < num_queries; ++i) {
    for (int r = 0; r < distances.columns; ++r) {
      distances.of_values[i * distances.columns + r] *= factor[i];
    }
  }
}

// Adds the weights w_t [keys, queries] of a tile to each query's row of distances. `rows` is
// scratch, [kTile, kTile].
template <typename T>
[[gnu::noinline]] void collect_tile(const Sum<T>* w_t, const QueryTile<T>& queries,
                                    const KeyTile<T>& keys, Sum<T>* rows, Sum<T>* of_distance,
                                    int distances) {
  using S = Sum<T>;
  const TileDistances<T>& relative = *queries.relative;
  transpose_matrix(w_t, padded_rows<S>(keys.num_keys), padded_rows<S>(queries.num_queries), kTile,
                   rows, kTile);
  for (int i = 0; i < queries.num_queries; ++i) {
    // Weights of causal keys after the query may not have been written.
    const int num_keys = keys.causal ? min_of(i + 1, keys.num_keys) : keys.num_keys;
    collect_distances(rows + i * kTile, relative.least, relative.num_distances - 1,
                      queries.positions[i], keys.positions, num_keys, of_distance + i * distances);
  }
}

}  // namespace
}  // namespace birkhoff
