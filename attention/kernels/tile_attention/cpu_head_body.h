// The base of kernels for one head (cpu_head.h): rows in scratch, and products of a tile of
// one side with rows of the other. Compiled once for each instruction set.
//
// Rows are widened to the type of sums and padded with zeros once per call. Scores are stored
// transposed, s_t[j][i], with the row that a pass reduces to in each lane.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/tile_attention/cpu_dropout.h"
#include "attention/kernels/tile_attention/cpu_head.h"

namespace birkhoff {
namespace {

inline int whole_tiles(int rows) { return round_up(rows, kTile); }

// Scratch is taken from `memory` in order or, if that is null, only counted.
struct ScratchLayout {
  std::byte* memory = nullptr;
  std::size_t used = 0;

  template <typename X>
  X* take(std::size_t count) {
    X* result = memory == nullptr ? nullptr : reinterpret_cast<X*>(memory + used);
    used += (count * sizeof(X) + 63) / 64 * 64;
    return result;
  }
};

// Queries or keys in scratch: `count` rows, followed by zeros up to a whole tile.
template <typename S>
struct Side {
  const S* rows = nullptr;
  int count = 0;
};

// x[i], or 0 if x is null.
template <typename S>
inline S at_or_zero(const S* x, int i) {
  return x == nullptr ? 0 : x[i];
}

template <typename T>
class HeadTiles {
 public:
  using S = Sum<T>;
  static constexpr int kN = kLanes<S>;
  static constexpr S kInfinity = __builtin_inf();

  HeadTiles(const HeadShape& shape, const AttentionHead<T>& head, ScratchLayout& memory)
      : head_dim(shape.head_dim),
        columns(round_up(shape.head_dim, 64 / static_cast<int>(sizeof(S)))),
        shape_(shape),
        head_(head),
        kept_(memory.take<Bit<S>>(2 * kTile)) {
    const auto take = [&](int rows) { return memory.take<S>(size_of(rows)); };
    for (S** x : {&q_, &d_out_}) *x = take(shape.max_queries);
    for (S** x : {&k_, &v_, &d_k_, &d_v_}) *x = take(shape.max_keys);
    a_t_ = take(kTile);
  }

  const int head_dim, columns;  // of rows in scratch, in elements

  // The rows of the head; q times the scale of scores.
  void load_rows() const {
    widen(head_.q, head_.num_queries, static_cast<S>(shape_.scale), q_);
    widen(head_.k, head_.num_keys, 1, k_);
    widen(head_.v, head_.num_keys, 1, v_);
  }
  void load_gradients() const {
    widen(head_.d_out, head_.num_queries, 1, d_out_);
    for (std::size_t x = 0; x < size_of(head_.num_keys); ++x) d_k_[x] = d_v_[x] = 0;
  }
  void write_key_gradients() const {
    write(d_k_, head_.num_keys, 1, 0, head_.d_k);  // q was scaled
    write(d_v_, head_.num_keys, 1, 0, head_.d_v);
  }

  // The number of elements of `count` rows in scratch.
  std::size_t size_of(int count) const {
    return static_cast<std::size_t>(whole_tiles(count)) * static_cast<std::size_t>(columns);
  }
  std::ptrdiff_t row(int index) const { return std::ptrdiff_t{index} * columns; }

  // Rows times `factor`, in scratch of size_of(count).
  void widen(Rows<const T> rows, int count, S factor, S* to) const {
    for (int r = 0; r < count; ++r) {
      const T* from = rows.data + r * rows.stride;
      for (int d = 0; d < head_dim; ++d) to[row(r) + d] = factor * to_sum(from[d]);
      for (int d = head_dim; d < columns; ++d) to[row(r) + d] = 0;
    }
    for (std::ptrdiff_t x = row(count); x < row(whole_tiles(count)); ++x) to[x] = 0;
  }
  // Rows of scratch times `factor`, as rows from `first` on.
  void write(const S* x, int count, S factor, int first, Rows<T> to) const {
    for (int r = 0; r < count; ++r) {
      T* out = to.data + (first + r) * to.stride;
      for (int d = 0; d < head_dim; ++d) out[d] = from_sum<T>(x[row(r) + d] * factor);
    }
  }

  // A tile's rows as columns: x_t [columns, kTile].
  void transpose_tile(const S* rows, S* x_t) const {
    transpose_matrix(rows, kTile, columns, columns, x_t, kTile);
  }

  // x_t[j][i] = a_i . b_j for the first `lanes` rows of a_t's tile and `count` rows b, and for the
  // rows that fill a panel. Rows of x_t lie `stride` apart.
  void multiply(const S* a_t, int lanes, const S* b, int count, S* x_t, int stride = kTile) const {
    for (int j = 0; j < count; j += kPanel) {
      multiply_panel(b + row(j), columns, 1, a_t, kTile, head_dim, x_t + std::ptrdiff_t{j} * stride,
                     stride, lanes, /*accumulate=*/false);
    }
  }
  // to[i] (+)= sum_j x_t[j][i] b_j for `count` rows b.
  void add_to_queries(const S* x_t, int num_queries, int count, const S* b, bool accumulate, S* to,
                      int stride = kTile) const {
    for (int i = 0; i < num_queries; i += kPanel) {
      multiply_panel(x_t + i, 1, stride, b, columns, count, to + row(i), columns, columns,
                     accumulate);
    }
  }
  // to[j] += sum_i x_t[j][i] b_i.
  void add_to_keys(const S* x_t, int num_keys, const S* b, int num_queries, S* to) const {
    for (int j = 0; j < num_keys; j += kPanel) {
      multiply_panel(x_t + j * kTile, kTile, 1, b, columns, num_queries, to + row(j), columns,
                     columns, /*accumulate=*/true);
    }
  }

  // Calls f(first, count, lanes) for the tiles of a side; a_t_ [columns, kTile] then holds the
  // tile, transposed.
  template <typename F>
  void for_tiles(const Side<S>& side, F f) const {
    for (int first = 0; first < side.count; first += kTile) {
      const int count = min_of(kTile, side.count - first);
      transpose_tile(side.rows + row(first), a_t_);
      f(first, count, round_up(count, kN));
    }
  }

  // Which of num_keys keys dropout keeps for a tile of queries, for keep(); null: all.
  const Bit<S>* draw(int first_query, int lanes, int first_key, int num_keys) const {
    if (shape_.dropout == nullptr) return nullptr;
    // {}: without their constructors, which have external linkage.
    TileShape shape{};
    shape.dropout = shape_.dropout;
    QueryTile<T> query_tile{};
    query_tile.sample_id = head_.sample_id;
    KeyTile<T> key_tile{};
    key_tile.num_keys = num_keys;
    key_tile.first_element =
        head_.first_element + first_query * shape_.dropout->query_stride + first_key;
    return draw_kept(shape, query_tile, round_up(lanes, 8), key_tile, kept_);
  }
  S kept_scale() const {
    return shape_.dropout == nullptr ? 1 : static_cast<S>(shape_.dropout->scale);
  }

  S *q_, *d_out_, *k_, *v_, *d_k_, *d_v_;  // [L or S, columns]
  S* a_t_;

 private:
  const HeadShape& shape_;
  const AttentionHead<T>& head_;
  Bit<S>* kept_;
};

}  // namespace
}  // namespace birkhoff
