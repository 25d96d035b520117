// A kernel that has met NaN runs again on copies with 0 in place of NaN; then NaN is written to the
// results that see it. Legend: i query, j key, d of D.
#include "attention/kernels/tile_attention/cpu_nan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace birkhoff {
namespace {

template <typename T>
constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
template <>
constexpr Bf16 kNaN<Bf16> = Bf16{0x7fc0};

template <typename T>
bool is_nan(T x) {
  return std::isnan(x);
}
bool is_nan(Bf16 x) { return (static_cast<std::uint16_t>(x) & 0x7fff) > 0x7f80; }

// Copies of rows, or of a matrix, with 0 for NaN.
template <typename T>
struct Clean {
  std::vector<T> numbers;
  std::vector<char> has_nan;  // of each row

  Clean(const T* data, std::ptrdiff_t row_stride, std::ptrdiff_t column_stride, int num_rows,
        int num_columns)
      : has_nan(static_cast<std::size_t>(num_rows)) {
    for (int r = 0; r < num_rows; ++r) {
      for (int c = 0; c < num_columns; ++c) {
        const T x = data[r * row_stride + c * column_stride];
        numbers.push_back(is_nan(x) ? T{} : x);
        if (is_nan(x)) has_nan[static_cast<std::size_t>(r)] = 1;
      }
    }
  }
  Clean(Rows<const T> rows, int num_rows, int head_dim)
      : Clean(rows.data, rows.stride, 1, num_rows, head_dim) {}

  bool has_nan_in(int row) const { return has_nan[static_cast<std::size_t>(row)] != 0; }
  void clear_row(int row, int num_columns) {
    std::fill_n(numbers.begin() + std::ptrdiff_t{row} * num_columns, num_columns, T{});
  }
};

template <typename T>
bool sees(const KeyTile<T>& keys, int i, int j) {
  return !(keys.causal && j > i) &&
         (!keys.mask || keys.mask[i * keys.mask_query_stride + j * keys.mask_key_stride]);
}

// Writes NaN to row j of a result, to its sums if it has some: to all of it, or where `like` is
// NaN.
template <typename T>
void make_nan(Rows<Sum<T>> sums, Rows<T> rows, int j, int head_dim, const T* like) {
  for (int d = 0; d < head_dim; ++d) {
    if (like && !is_nan(like[d])) continue;
    if (sums.data) {
      sums.data[j * sums.stride + d] = kNaN<Sum<T>>;
    } else {
      rows.data[j * rows.stride + d] = kNaN<T>;
    }
  }
}

// Writes NaN to the gradients of the vectors of the distance between query i and key j, as to the
// gradients of the key and its value.
template <typename T>
void make_table_nan(const QueryTile<T>& queries, const KeyTile<T>& keys, int i, int j, int head_dim,
                    bool nan_p) {
  const TileDistances<T>& relative = *queries.relative;
  const int row = std::clamp(keys.positions[j] - queries.positions[i] - relative.least, 0,
                             relative.num_distances - 1);
  const auto rows = [&](Sum<T>* table) { return Rows<Sum<T>>{table, whole_columns<T>(head_dim)}; };
  make_nan<T>(rows(relative.d_keys), {}, row, head_dim, nullptr);
  if (!relative.values) return;
  make_nan<T>(rows(relative.d_values), {}, row, head_dim,
              nan_p ? nullptr : queries.d_out.data + i * queries.d_out.stride);
}

// The same call on clean copies.
template <typename T>
struct CleanCall {
  QueryTile<T> queries;
  std::vector<KeyTile<T>> keys;
  Clean<T> q;
  std::vector<Clean<T>> k, v, bias;  // of each tile; without a bias, `bias` is empty

  CleanCall(const TileShape& shape, const QueryTile<T>& given, const KeyTile<T>* given_keys,
            int num_key_tiles)
      : queries(given),
        keys(given_keys, given_keys + num_key_tiles),
        q(given.q, given.num_queries, shape.head_dim) {
    for (KeyTile<T>& tile : keys) {
      k.emplace_back(tile.k, tile.num_keys, shape.head_dim);
      v.emplace_back(tile.v, tile.num_keys, shape.head_dim);
      if (is_nan(tile.weight)) {
        std::fill(k.back().has_nan.begin(), k.back().has_nan.end(), 1);
        tile.weight = 1;
      }
      bias.emplace_back(tile.bias, tile.bias_query_stride, tile.bias_key_stride,
                        tile.bias ? given.num_queries : 0, tile.num_keys);
    }
    // The vectors have stopped growing: pointers into them stay valid.
    queries.q = {q.numbers.data(), shape.head_dim};
    for (std::size_t t = 0; t < keys.size(); ++t) {
      keys[t].k = {k[t].numbers.data(), shape.head_dim};
      keys[t].v = {v[t].numbers.data(), shape.head_dim};
      if (!keys[t].bias) continue;
      keys[t].bias = bias[t].numbers.data();
      keys[t].bias_query_stride = keys[t].num_keys;
      keys[t].bias_key_stride = 1;
    }
  }
};

// Whether s_ij is NaN for a key j of the tile that query i sees.
template <typename T>
bool has_nan_score(const CleanCall<T>& clean, const KeyTile<T>& keys, std::size_t tile, int i) {
  for (int j = 0; j < keys.num_keys; ++j) {
    if (!sees(keys, i, j)) continue;
    if (clean.q.has_nan_in(i) || clean.k[tile].has_nan_in(j)) return true;
    if (keys.bias && is_nan(keys.bias[i * keys.bias_query_stride + j * keys.bias_key_stride])) {
      return true;
    }
  }
  return false;
}

template <typename T>
void attend_past_nan(const TileKernels<T>& kernels, const TileShape& shape,
                     const QueryTile<T>& queries, const KeyTile<T>* keys, int num_key_tiles,
                     void* scratch) {
  const CleanCall<T> clean(shape, queries, keys, num_key_tiles);
  kernels.forward(shape, clean.queries, clean.keys.data(), num_key_tiles, scratch);
  for (int i = 0; i < queries.num_queries; ++i) {
    const auto make_out_nan = [&](const T* like) {
      make_nan<T>(queries.out_sum, queries.out, i, shape.head_dim, like);
    };
    for (int t = 0; t < num_key_tiles; ++t) {
      const auto tile = static_cast<std::size_t>(t);
      if (has_nan_score(clean, keys[t], tile, i)) {
        make_out_nan(nullptr);
        queries.max[i] = 0;
        queries.inverse_sum[i] = kNaN<Sum<T>>;
      }
      for (int j = 0; j < keys[t].num_keys; ++j) {
        if (!clean.v[tile].has_nan_in(j) || !sees(keys[t], i, j)) continue;
        make_out_nan(keys[t].v.data + j * keys[t].v.stride);
      }
    }
  }
}

template <typename T>
void add_gradients_past_nan(const TileKernels<T>& kernels, const TileShape& shape,
                            const QueryTile<T>& queries, const KeyTile<T>* keys, int num_key_tiles,
                            void* scratch) {
  const int num_queries = queries.num_queries, D = shape.head_dim;
  CleanCall<T> clean(shape, queries, keys, num_key_tiles);
  Clean<T> d_out(queries.d_out, num_queries, D);
  const Clean<Sum<T>> rest(queries.rest, 1, 1, queries.rest ? num_queries : 0, 1);
  if (queries.rest) clean.queries.rest = rest.numbers.data();
  // Queries whose p are NaN are left out.
  std::vector<Sum<T>> inverse_sum(queries.inverse_sum, queries.inverse_sum + num_queries);
  for (int i = 0; i < num_queries; ++i) {
    if (!is_nan(queries.inverse_sum[i])) continue;
    inverse_sum[static_cast<std::size_t>(i)] = 0;
    clean.q.clear_row(i, D);
    d_out.clear_row(i, D);
    for (std::size_t t = 0; t < clean.keys.size(); ++t) {
      if (keys[t].bias) clean.bias[t].clear_row(i, keys[t].num_keys);
    }
  }
  clean.queries.inverse_sum = inverse_sum.data();
  clean.queries.d_out = {d_out.numbers.data(), D};
  kernels.backward(shape, clean.queries, clean.keys.data(), num_key_tiles, OnNaN::kGoOn, scratch);

  for (int i = 0; i < num_queries; ++i) {
    const bool nan_p = is_nan(queries.inverse_sum[i]);
    bool sees_keys = false, nan_v = false;
    for (std::size_t t = 0; t < clean.keys.size(); ++t) {
      for (int j = 0; j < keys[t].num_keys; ++j) {
        if (!sees(keys[t], i, j)) continue;
        sees_keys = true;
        nan_v = nan_v || clean.v[t].has_nan_in(j);
      }
    }
    // All of ds_i is NaN, since delta_i is; d_v_j takes p_ij d_out_i.
    const bool nan_rest = queries.rest && rest.has_nan_in(i);
    const bool nan_ds = sees_keys && (nan_p || d_out.has_nan_in(i) || nan_v || nan_rest);
    if (!nan_ds) continue;
    make_nan<T>(queries.d_q_sum, queries.d_q, i, D, nullptr);
    if (queries.d_sink) *queries.d_sink = kNaN<double>;
    for (int t = 0; t < num_key_tiles; ++t) {
      const KeyTile<T>& tile = keys[t];
      for (int j = 0; j < tile.num_keys; ++j) {
        if (!sees(tile, i, j)) continue;
        make_nan<T>(tile.d_k_sum, tile.d_k, j, D, nullptr);
        make_nan<T>(tile.d_v_sum, tile.d_v, j, D,
                    nan_p ? nullptr : queries.d_out.data + i * queries.d_out.stride);
        if (tile.d_weight) *tile.d_weight = kNaN<double>;
        if (queries.relative && tile.positions) {
          make_table_nan(queries, tile, i, j, D, nan_p);
        }
        if (tile.d_bias) {
          tile.d_bias[i * tile.d_bias_query_stride + j * tile.d_bias_key_stride] = kNaN<double>;
        }
      }
    }
  }
}

}  // namespace

template <typename T>
void attend_tile(const TileKernels<T>& kernels, const TileShape& shape, const QueryTile<T>& queries,
                 const KeyTile<T>* keys, int num_key_tiles, void* scratch) {
  if (kernels.forward(shape, queries, keys, num_key_tiles, scratch)) return;
  attend_past_nan(kernels, shape, queries, keys, num_key_tiles, scratch);
}

template <typename T>
void add_tile_gradients(const TileKernels<T>& kernels, const TileShape& shape,
                        const QueryTile<T>& queries, const KeyTile<T>* keys, int num_key_tiles,
                        void* scratch) {
  if (kernels.backward(shape, queries, keys, num_key_tiles, OnNaN::kStop, scratch)) return;
  add_gradients_past_nan(kernels, shape, queries, keys, num_key_tiles, scratch);
}

template void attend_tile(const TileKernels<float>&, const TileShape&, const QueryTile<float>&,
                          const KeyTile<float>*, int, void*);
template void attend_tile(const TileKernels<double>&, const TileShape&, const QueryTile<double>&,
                          const KeyTile<double>*, int, void*);
template void attend_tile(const TileKernels<Bf16>&, const TileShape&, const QueryTile<Bf16>&,
                          const KeyTile<Bf16>*, int, void*);
template void add_tile_gradients(const TileKernels<float>&, const TileShape&,
                                 const QueryTile<float>&, const KeyTile<float>*, int, void*);
template void add_tile_gradients(const TileKernels<double>&, const TileShape&,
                                 const QueryTile<double>&, const KeyTile<double>*, int, void*);
template void add_tile_gradients(const TileKernels<Bf16>&, const TileShape&, const QueryTile<Bf16>&,
                                 const KeyTile<Bf16>*, int, void*);

}  // namespace birkhoff
