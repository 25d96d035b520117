// Arguments of the GPU kernel that chooses blocks. See
// attention/kernels/block_top_k/gpu_top_k.cu. Legend: B batch, H heads, L queries, D head dim, N
// whole blocks, C chosen blocks.
#pragma once

#include <cstdint>

#include "attention/kernels/common/gpu_rows.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct BlockTopKParams {
  static constexpr int kMaxHeadDim = 256, kMaxChosen = 64;

  KernelDtype dtype;  // of q: kFloat, kBFloat16 or kHalf
  int batch, heads, queries, head_dim;
  int block, blocks, chosen;  // tokens of a block, N, C
  bool causal;
  RowsParams q;
  const float* means;                   // [B, H, N, D]: the mean keys
  const std::int32_t* documents;        // [B, L], or [1, L] if shared: Documents::number_BL
  const std::int32_t* block_documents;  // [B, N], or [1, N]; -1: the block cannot be chosen
  bool shared_documents;                // by all samples
  std::int32_t* result;                 // [B, H, L, C]
};

// Asynchronous on `stream`.
void launch_block_choice(const BlockTopKParams& params, CUstream_st* stream);

}  // namespace birkhoff
