// The products of cpu_mix.h, compiled once for each instruction set. They use the register blocks
// of the tile kernels.
#pragma once

#include "attention/kernels/block_mix/cpu_mix.h"
#include "attention/kernels/common/cpu_products.h"

namespace birkhoff {
namespace {

inline int clamp(int x, int least, int most) { return x < least ? least : min_of(x, most); }

// The problem of one head, and its scratch matrices. Operands that are pairs are stored in rows or
// stacked, as in the tile kernels.
template <typename T>
struct HeadMix {
  using E = Operand<T>;
  using S = Sum<T>;
  static constexpr int kN = kNumbers<E>;

  const MixShape& shape;
  int rows, columns;  // N and D, padded to whole panels, vectors and pairs
  S* d_w;             // [rows, rows]
  S* panel;           // [kPanel, columns]
  E* w;               // [rows, rows] in rows: the weights, or their transpose
  E *x, *d_y;         // [rows, columns] in rows
  E* x_t;             // x transposed, `rows` wide
  E* stacked;         // [rows, columns], only for pairs

  static std::size_t bytes(const MixShape& shape) {
    const auto rows = static_cast<std::size_t>(padded_rows<S>(shape.num_blocks));
    const auto columns = static_cast<std::size_t>(padded_columns<T>(shape.head_dim));
    return (rows * rows + kPanel * columns) * sizeof(S) +
           (rows * rows + (kN > 1 ? 4 : 3) * rows * columns) / kN * sizeof(E);
  }

  HeadMix(const MixShape& new_shape, void* memory)
      : shape(new_shape),
        rows(padded_rows<S>(shape.num_blocks)),
        columns(padded_columns<T>(shape.head_dim)),
        d_w(static_cast<S*>(memory)),
        panel(d_w + std::ptrdiff_t{rows} * rows),
        w(reinterpret_cast<E*>(panel + kPanel * columns)),
        x(w + std::ptrdiff_t{rows} * rows / kN),
        d_y(x + rows * columns / kN),
        x_t(d_y + rows * columns / kN),
        stacked(x_t + rows * columns / kN) {}

  // The end of the sources that destinations up to u use.
  int end_source(int u) const { return clamp(u + shape.diagonal + 1, 0, shape.num_blocks); }

  void load_weights(const MixWeights<T>& weights, bool transposed) {
    using Number = std::conditional_t<(kN > 1), T, E>;
    auto* to = reinterpret_cast<Number*>(w);
    __builtin_memset(w, 0, sizeof(E) * static_cast<std::size_t>(rows) * rows / kN);
    const std::ptrdiff_t u_stride = transposed ? 1 : rows, v_stride = transposed ? rows : 1;
    for (int u = 0; u < shape.num_blocks; ++u) {
      for (int v = 0; v < end_source(u); ++v) {
        const T weight = weights.at(u, v);
        if constexpr (kN > 1) {
          to[u * u_stride + v * v_stride] = weight;
        } else {
          to[u * u_stride + v * v_stride] = to_sum(weight);
        }
      }
    }
  }

  // Loads rows with 0 in place of NaN, because a product multiplies them by weights of 0 too.
  void load_without_nan(Rows<const T> rows_in, E* operands) const {
    const int N = shape.num_blocks, D = shape.head_dim;
    load_rows(rows_in, N, D, columns, operands);
    auto* numbers = reinterpret_cast<std::conditional_t<(kN > 1), T, E>*>(operands);
    for (int r = 0; r < N; ++r) {
      for (int d = 0; d < D; ++d) {
        if (is_nan(rows_in.data[r * rows_in.stride + d])) numbers[r * columns + d] = {};
      }
    }
  }

  // Copies NaN from each row of `from` to the results that have a nonzero weight for this row.
  // `transposed`: results are sources.
  void spread_nan(const MixWeights<T>& weights, bool transposed, Rows<const T> from,
                  Rows<T> to) const {
    const int N = shape.num_blocks;
    for (int u = 0; u < N; ++u) {
      for (int v = 0; v < end_source(u); ++v) {
        if (to_sum(weights.at(u, v)) == 0) continue;
        const T* row = from.data + (transposed ? u : v) * from.stride;
        T* result = to.data + (transposed ? v : u) * to.stride;
        for (int d = 0; d < shape.head_dim; ++d) {
          if (is_nan(row[d])) result[d] = row[d];
        }
      }
    }
  }

  // Computes the results of the panel that begins at `row` from the rows [first, end) of `from`,
  // which is stacked; all other rows have weight 0. Adds `others` where it has data. Returns
  // whether result `suspect` is in this panel and holds NaN.
  bool mix_panel(int row, int first, int end, const E* from, Rows<const T> others, Rows<T> to,
                 int suspect) const {
    const int D = shape.head_dim, num_rows = min_of(kPanel, shape.num_blocks - row);
    const int first_operand = first / kN, depth = round_up(end, kN) / kN - first_operand;
    S* out = panel;
    std::ptrdiff_t out_row = columns;
    bool direct = false;
    if constexpr (std::is_same_v<S, T>) {
      direct = num_rows == kPanel && columns == D;
      if (direct) {
        out = to.data + row * to.stride;
        out_row = to.stride;
      }
    }
    const bool adds = others.data != nullptr;
    for (int r = 0; adds && r < num_rows; ++r) {
      const T* other = others.data + (row + r) * others.stride;
      for (int d = 0; d < D; ++d) out[r * out_row + d] = to_sum(other[d]);
      for (int d = D; d < columns; ++d) out[r * out_row + d] = 0;
    }
    multiply_panel(w + (std::ptrdiff_t{row} * rows) / kN + first_operand, rows / kN, 1,
                   from + first_operand * columns, columns, depth, out, out_row, columns, adds);
    for (int r = 0; !direct && r < num_rows; ++r) {
      T* to_row = to.data + (row + r) * to.stride;
      for (int d = 0; d < D; ++d) to_row[d] = from_sum<T>(panel[r * columns + d]);
    }
    return suspect >= row && suspect < row + num_rows &&
           has_nan(out + (suspect - row) * out_row, columns);
  }

  // d_w += d_y x^T.
  void add_weight_gradient() const {
    transpose_matrix(x, rows, columns / kN, columns / kN, x_t, rows);
    for (int u = 0; u < shape.num_blocks; u += kPanel) {
      multiply_panel(d_y + u * columns / kN, columns / kN, 1, x_t, rows,
                     round_up(shape.head_dim, kN) / kN, d_w + std::ptrdiff_t{u} * rows, rows,
                     round_up(end_source(u + kPanel - 1), kLanes<S>), /*accumulate=*/true);
    }
  }
};

// Prefetches the rows that are read after those of x[i] at offset s.
template <typename T>
void prefetch_next(const MixShape& shape, const HeadBlocks<const T>* x, int count, int i, int s) {
  const bool same_offset = i + 1 < count;
  if (!same_offset && s + 1 == shape.block) return;
  prefetch_rows<Use::kRead>(x[same_offset ? i + 1 : 0].at_offset(same_offset ? s : s + 1),
                            shape.num_blocks, shape.head_dim);
}

template <typename T>
void mix_forward(const MixShape& shape, const MixWeights<T>& w, const HeadBlocks<const T>* x,
                 const HeadBlocks<T>* y, int count, void* memory) {
  const int N = shape.num_blocks;
  HeadMix<T> mix(shape, memory);
  mix.load_weights(w, /*transposed=*/false);
  for (int s = 0; s < shape.block; ++s) {
    for (int i = 0; i < count; ++i) {
      load_rows(x[i].at_offset(s), N, shape.head_dim, mix.columns, mix.x);
      prefetch_next(shape, x, count, i, s);
      prefetch_rows<Use::kWrite>(y[i].at_offset(s), N, shape.head_dim);
      // The last row multiplies every source that any row multiplies, so NaN in a source shows
      // there.
      const auto meets_nan = [&] {
        const auto* stacked = stack_rows(mix.x, mix.rows, mix.columns, mix.stacked);
        bool met = false;
        for (int u = 0; u < N; u += kPanel) {
          met = mix.mix_panel(u, 0, mix.end_source(u + kPanel - 1), stacked, {}, y[i].at_offset(s),
                              /*suspect=*/N - 1);
        }
        return met;
      };
      // meets_nan is called from one place, so that it is inlined.
      bool hides_nan = false;
      for (; meets_nan() && !hides_nan; hides_nan = true) {
        mix.load_without_nan(x[i].at_offset(s), mix.x);
      }
      if (hides_nan) {
        mix.spread_nan(w, /*transposed=*/false, x[i].at_offset(s), y[i].at_offset(s));
      }
    }
  }
}

template <typename T>
void mix_backward(const MixShape& shape, const MixWeights<T>& w, const HeadBlocks<const T>* x,
                  const HeadBlocks<const T>* d_y, const HeadBlocks<const T>* others,
                  const HeadBlocks<T>* d_x, int count, T* d_w, void* memory) {
  const int N = shape.num_blocks;
  HeadMix<T> mix(shape, memory);
  mix.load_weights(w, /*transposed=*/true);
  __builtin_memset(mix.d_w, 0, sizeof(Sum<T>) * static_cast<std::size_t>(mix.rows) * mix.rows);
  for (int s = 0; s < shape.block; ++s) {
    for (int i = 0; i < count; ++i) {
      load_rows(d_y[i].at_offset(s), N, shape.head_dim, mix.columns, mix.d_y);
      prefetch_rows<Use::kRead>(x[i].at_offset(s), N, shape.head_dim);
      prefetch_rows<Use::kRead>(others[i].at_offset(s), N, shape.head_dim);
      prefetch_rows<Use::kWrite>(d_x[i].at_offset(s), N, shape.head_dim);
      // The first source multiplies every row that any source multiplies, so NaN in a row shows
      // there.
      const auto meets_nan = [&] {
        const auto* stacked = stack_rows(mix.d_y, mix.rows, mix.columns, mix.stacked);
        bool met = false;
        for (int v = 0; v < N; v += kPanel) {
          const int first = clamp(v - shape.diagonal, 0, N);
          met |= mix.mix_panel(v, round_down(first, mix.kN), N, stacked, others[i].at_offset(s),
                               d_x[i].at_offset(s), /*suspect=*/0);
        }
        return met;
      };
      bool hides_nan = false;
      for (; meets_nan() && !hides_nan; hides_nan = true) {
        mix.load_without_nan(d_y[i].at_offset(s), mix.d_y);
      }
      if (hides_nan) {
        mix.spread_nan(w, /*transposed=*/true, d_y[i].at_offset(s), d_x[i].at_offset(s));
        load_rows(d_y[i].at_offset(s), N, shape.head_dim, mix.columns, mix.d_y);
      }
      load_rows(x[i].at_offset(s), N, shape.head_dim, mix.columns, mix.x);
      prefetch_next(shape, d_y, count, i, s);
      mix.add_weight_gradient();
    }
  }
  for (int u = 0; u < N; ++u) {
    for (int v = 0; v < N; ++v) {
      const Sum<T> d = v < mix.end_source(u) ? mix.d_w[std::ptrdiff_t{u} * mix.rows + v] : 0;
      const bool unseen = d != d && to_sum(w.at(u, v)) == 0;
      d_w[std::ptrdiff_t{u} * N + v] = from_sum<T>(unseen ? 0 : d);
    }
  }
}

template <typename T>
constexpr MixKernels<T> kMixKernels = {&HeadMix<T>::bytes, &mix_forward<T>, &mix_backward<T>};

}  // namespace
}  // namespace birkhoff
