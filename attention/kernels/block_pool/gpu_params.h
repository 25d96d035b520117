// Arguments of the GPU kernels of block pooling. See attention/kernels/block_pool/gpu_pool.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// The terms of a block's features in cumulative pooling. Bits of BlockPoolParams::links.
constexpr std::uint8_t kFirstExists = 1;  // its first token is not padding
constexpr std::uint8_t kOpens = 2;        // the sums so far belong to its first token's document
constexpr std::uint8_t kKeeps = 4;        // the sums so far belong to its last token's document

struct BlockPoolParams {
  KernelDtype dtype;  // of x and d_x: kFloat, kBFloat16 or kHalf
  bool vectors;       // whether rows of x and d_x can be moved 16 bytes at a time
  bool cumulative;
  std::int64_t batch, tokens, channels, blocks, block;
  const bool* mask;           // [batch, blocks, block]: the tokens to add up; null: all
  const float* divisor;       // [batch, blocks]; null: 1
  const std::uint8_t* links;  // [batch, blocks]; null: all bits

  // Forward: row t of x begins at x + batch x_strides[0] + t x_strides[1].
  const void* x;
  std::int64_t x_strides[2];
  float* psi;  // [batch, blocks, channels]

  // Backward.
  const float* d_psi;  // same shape as psi
  float* later;        // scratch, same shape as psi; used only if cumulative
  void* d_x;           // [batch, tokens, channels]; every element is written
};

// Asynchronous on `stream`.
void launch_block_pool(const BlockPoolParams& params, CUstream_st* stream);
void launch_block_pool_backward(const BlockPoolParams& params, CUstream_st* stream);

}  // namespace birkhoff
