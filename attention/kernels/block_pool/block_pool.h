// Sums and means over blocks of tokens in one pass over them, with gradients: what the SortNet
// reads. Legend: B batch, L tokens, N blocks, b tokens of a block, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/block_pool/gpu_params.h"
#include "attention/kernels/common/path.h"

namespace birkhoff {

// Tensors live where x does, and have a batch of 1 or B.
struct BlockPooling {
  std::int64_t block;        // b; the last block ends where tokens do
  at::Tensor mask_BNb{};     // bool: tokens that are added up. Undefined: all
  at::Tensor divisor_BN1{};  // of the dtype of the result. Undefined: 1
  // False: a block's features are its sum. True: with links L (kFirstExists, ... of
  // gpu_params.h; each is 0 or 1) they are opens_n e_n + first_exists_n x_(n b), of the sums
  // so far e_0 = 0, e_(n+1) = keeps_n e_n + sum_n.
  bool cumulative = false;
  at::Tensor links_BN{};  // uint8. Undefined: all bits
};

// kFused, pool_blocks(), for fp32, fp64 or bf16 on the CPU, fp32, bf16 or fp16 on a GPU.
Path choose_path(const at::Tensor& x_BLC, Path limit);

// Features [B, N, C] of x [B, L, C], in fp64 for fp64, else in fp32, divided. Reads x once, but a
// block's first token twice if cumulative, what is masked only where links ask for it, and writes
// its gradient once. Sums run from token to token, then from block to
// block: no feature depends on a later token in any bit, nor on the number of threads, and CPU and
// GPU give the same bits.
at::Tensor pool_blocks(const at::Tensor& x_BLC, const BlockPooling& pooling);

}  // namespace birkhoff
