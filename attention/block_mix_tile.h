// Block mixing at one token offset of one head: products of an [N, N] matrix of block weights,
// whose upper part is 0, with N rows of D numbers. Raw pointers, no LibTorch; block_mix.cpp is the
// user.
//
//   y_ud = sum_v w_uv x_vd,   d_x_vd = sum_u w_uv d_y_ud,   d_w_uv += sum_d d_y_ud x_vd,
//
// each over v <= u + diagonal alone: half of the work where a block sees earlier blocks only.
#pragma once

#include <cstddef>

#include "attention/tile_attention.h"

namespace birkhoff {

struct MixShape {
  int num_blocks = 0, head_dim = 0;
  int diagonal = 0;  // as of at::tril; at least -N and less than N
};

// Matrices of weights are [padded_blocks, padded_blocks], 0 outside what the products are over.
// `scratch`: scratch_bytes bytes, aligned to 64. Calls touch their arguments alone.
template <typename T>
struct MixKernels {
  int (*padded_blocks)(int num_blocks);
  std::size_t (*scratch_bytes)(const MixShape& shape);
  void (*forward)(const MixShape& shape, const T* w, Rows<const T> x, Rows<T> y, void* scratch);
  // w_t is w transposed. Writes d_x and adds to d_w.
  void (*backward)(const MixShape& shape, const T* w_t, Rows<const T> x, Rows<const T> d_y,
                   Rows<T> d_x, T* d_w, void* scratch);
};

// For T = float and double.
template <typename T>
const MixKernels<T>& mix_kernels(InstructionSet set);

}  // namespace birkhoff
