// Arguments of the kernels of block pooling. See attention/kernels/block_pool/gpu_pool.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// What a block's features are made of, in cumulative pooling. Bits of BlockPoolParams::links.
constexpr std::uint8_t kFirstExists = 1;  // its first token is no padding
constexpr std::uint8_t kOpens = 2;        // the sums so far are of its first token's document
constexpr std::uint8_t kKeeps = 4;        // the sums so far are of its last token's document

struct BlockPoolParams {
  KernelDtype dtype;  // of x and d_x: kFloat, kBFloat16 or kHalf
  bool vectors;       // can rows of x and d_x be moved 16 bytes at a time?
  bool cumulative;
  std::int64_t batch, tokens, channels, blocks, block;
  const bool* mask;           // [batch, blocks, block]: tokens that are added up; null: all
  const float* divisor;       // [batch, blocks]; null: 1
  const std::uint8_t* links;  // [batch, blocks]; null: all bits

  // Forward: row t of x begins at x + batch x_strides[0] + t x_strides[1].
  const void* x;
  std::int64_t x_strides[2];
  float* psi;  // [batch, blocks, channels]

  // Backward.
  const float* d_psi;  // as psi
  float* later;        // as psi, scratch; unused unless cumulative
  void* d_x;           // [batch, tokens, channels]; all is written
};

// Asynchronous on `stream`.
void launch_block_pool(const BlockPoolParams& params, CUstream_st* stream);
void launch_block_pool_backward(const BlockPoolParams& params, CUstream_st* stream);

}  // namespace birkhoff
