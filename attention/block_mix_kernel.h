// The products of block_mix_tile.h, compiled once for each instruction set, on the register blocks
// of the tile kernels.
#pragma once

#include "attention/block_mix_tile.h"
#include "attention/tile_products.h"

namespace birkhoff {
namespace {

// Whole panels of rows, whole vectors of columns.
template <typename T>
int padded_blocks(int num_blocks) {
  return round_up(num_blocks, kPanel > kLanes<T> ? kPanel : kLanes<T>);
}

// Scratch matrices of one call.
template <typename T>
struct MixScratch {
  int rows, columns;  // N and D, padded
  T *x, *d_y;         // [rows, columns]
  T* x_t;             // [columns, rows]
  T* panel;           // [kPanel, columns]

  MixScratch(const MixShape& shape, void* memory)
      : rows(padded_blocks<T>(shape.num_blocks)),
        columns(padded_columns<T>(shape.head_dim)),
        x(static_cast<T*>(memory)),
        d_y(x + rows * columns),
        x_t(d_y + rows * columns),
        panel(x_t + rows * columns) {}

  static std::size_t bytes(const MixShape& shape) {
    return static_cast<std::size_t>((3 * padded_blocks<T>(shape.num_blocks) + kPanel) *
                                    padded_columns<T>(shape.head_dim)) *
           sizeof(T);
  }
};

inline int clamp(int x, int least, int most) { return x < least ? least : min_of(x, most); }

// A panel of results from the rows [first, end) of x, of which all others have weight 0.
template <typename T>
void mix_panel(const MixShape& shape, const MixScratch<T>& scratch, const T* w, int panel,
               int first, int end, const T* x, Rows<T> y) {
  const int D = shape.head_dim, num_rows = min_of(kPanel, shape.num_blocks - panel);
  const bool direct = num_rows == kPanel && scratch.columns == D;
  T* out = direct ? y.data + panel * y.stride : scratch.panel;
  multiply_panel(w + panel * scratch.rows + first, scratch.rows, 1, x + first * scratch.columns,
                 scratch.columns, end - first, out, direct ? y.stride : scratch.columns,
                 scratch.columns, /*accumulate=*/false);
  if (direct) return;
  for (int r = 0; r < num_rows; ++r) {
    for (int d = 0; d < D; ++d) y.data[(panel + r) * y.stride + d] = out[r * scratch.columns + d];
  }
}

template <typename T>
void mix_forward(const MixShape& shape, const T* w, Rows<const T> x, Rows<T> y, void* memory) {
  const int N = shape.num_blocks;
  const MixScratch<T> scratch(shape, memory);
  load_rows(x, N, shape.head_dim, scratch.columns, scratch.x);
  for (int u = 0; u < N; u += kPanel) {
    mix_panel(shape, scratch, w, u, 0, clamp(u + kPanel + shape.diagonal, 0, N), scratch.x, y);
  }
}

template <typename T>
void mix_backward(const MixShape& shape, const T* w_t, Rows<const T> x, Rows<const T> d_y,
                  Rows<T> d_x, T* d_w, void* memory) {
  constexpr int kN = kLanes<T>;
  const int N = shape.num_blocks, D = shape.head_dim;
  const MixScratch<T> scratch(shape, memory);
  load_rows(d_y, N, D, scratch.columns, scratch.d_y);
  for (int v = 0; v < N; v += kPanel) {
    mix_panel(shape, scratch, w_t, v, clamp(v - shape.diagonal, 0, N), N, scratch.d_y, d_x);
  }
  load_rows(x, N, D, scratch.columns, scratch.x);
  for (int r = 0; r < scratch.rows; r += kN) {
    for (int c = 0; c < scratch.columns; c += kN) {
      Vector<T> block[kN];
      for (int i = 0; i < kN; ++i) block[i] = load(scratch.x + (r + i) * scratch.columns + c);
      transpose<T>(block);
      for (int i = 0; i < kN; ++i) store(scratch.x_t + (c + i) * scratch.rows + r, block[i]);
    }
  }
  for (int u = 0; u < N; u += kPanel) {
    const int end = round_up(clamp(u + kPanel + shape.diagonal, 0, N), kN);
    multiply_panel(scratch.d_y + u * scratch.columns, scratch.columns, 1, scratch.x_t, scratch.rows,
                   D, d_w + u * scratch.rows, scratch.rows, end, /*accumulate=*/true);
  }
}

template <typename T>
constexpr MixKernels<T> kMixKernels = {&padded_blocks<T>, &MixScratch<T>::bytes, &mix_forward<T>,
                                       &mix_backward<T>};

}  // namespace
}  // namespace birkhoff
