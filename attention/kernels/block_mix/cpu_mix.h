// Block mixing of one head: at each of b token offsets, the product of an [N, N] matrix of block
// weights, whose upper part is 0, and N rows of D elements. Works on raw pointers, without
// LibTorch; block_mix.cpp calls it.
//
//   y_usd = sum_v w_uv x_vsd,   d_x_vsd = sum_u w_uv d_y_usd,   d_w_uv = sum_sd d_y_usd x_vsd,
//
// Each sum runs only over v <= u + diagonal: half of the work where a block sees only earlier
// blocks. NaN in x or d_y is hidden where w_uv = 0. The number type T is float, double or Bf16;
// Bf16 is summed in float and rounded once.
#pragma once

#include <cstddef>

#include "attention/kernels/common/number_types.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {

struct MixShape {
  int num_blocks = 0, block = 0, head_dim = 0;
  int diagonal = 0;  // as in at::tril; in [-N, N)
};

// Weight uv is at data + u * row_stride + v * column_stride. Weights above the diagonal are not
// read.
template <typename T>
struct MixWeights {
  const T* data = nullptr;
  std::ptrdiff_t row_stride = 0, column_stride = 0;

  T at(int u, int v) const { return data[u * row_stride + v * column_stride]; }
};

// Token s of block u is a row of D contiguous elements at data + u * block_stride + s *
// token_stride.
template <typename T>
struct HeadBlocks {
  T* data = nullptr;
  std::ptrdiff_t block_stride = 0, token_stride = 0;

  Rows<T> at_offset(int s) const { return {data + s * token_stride, block_stride}; }
};

// The kernels take `count` tensors x that share the weights; the weight gradient is the sum over
// all of them. `scratch` points to scratch_bytes() bytes, aligned to 64. Calls touch only their
// arguments.
template <typename T>
struct MixKernels {
  std::size_t (*scratch_bytes)(const MixShape& shape);
  void (*forward)(const MixShape& shape, const MixWeights<T>& w, const HeadBlocks<const T>* x,
                  const HeadBlocks<T>* y, int count, void* scratch);
  // Adds the tensors of `others` that have data to d_x. d_w is [N, N], contiguous, and 0 above the
  // diagonal.
  void (*backward)(const MixShape& shape, const MixWeights<T>& w, const HeadBlocks<const T>* x,
                   const HeadBlocks<const T>* d_y, const HeadBlocks<const T>* others,
                   const HeadBlocks<T>* d_x, int count, T* d_w, void* scratch);
};

// For T = float, double and Bf16.
template <typename T>
const MixKernels<T>& mix_kernels(InstructionSet set);

// Defined in cpu_mix.simd.cpp, compiled for kSet.
template <InstructionSet kSet, typename T>
const MixKernels<T>& compiled_mix_kernels();

}  // namespace birkhoff
