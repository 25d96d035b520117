// Sums and means over blocks of tokens in one pass, and their first tokens, with gradients: the
// input of the SortNet.
// Legend: B batch, L tokens, N blocks, b tokens of a block, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/block_pool/gpu_params.h"
#include "attention/kernels/common/path.h"

namespace birkhoff {

// All tensors are on the device of x and have a batch of 1 or B.
struct BlockPooling {
  std::int64_t block;        // b; the last block ends with the last token
  at::Tensor mask_BNb{};     // bool: the tokens to add up. Undefined: all
  at::Tensor divisor_BN1{};  // of the dtype of the result. Undefined: 1
  // False: the features of a block are its sum. True: they are
  // opens_n e_n + first_exists_n x_(n b), where e_n is the sum so far: e_0 = 0, e_(n+1) = keeps_n
  // e_n + sum_n. opens_n, keeps_n and first_exists_n, each 0 or 1, are the bits of links_BN
  // (kOpens, ... in gpu_params.h).
  bool cumulative = false;
  at::Tensor links_BN{};  // uint8. Undefined: all bits
};

// kFused, which is pool_blocks(), for fp32, fp64 and bf16 on the CPU and for fp32, bf16 and fp16 on
// a GPU; otherwise kReference.
PathChoice choose_path(const at::Tensor& x_BLC, Path limit);

// Returns the features [B, N, C] of x [B, L, C], after division, in fp64 for fp64 and otherwise in
// fp32. Reads x once, except that cumulative pooling reads the first token of a block twice; reads
// masked tokens only where links ask for them. Writes the gradient of x once. Sums run from token
// to token, then from block to block. So no bit of a feature depends on a later token or on the
// number of threads, and CPU and GPU give the same bits.
at::Tensor pool_blocks(const at::Tensor& x_BLC, const BlockPooling& pooling);

// x, and the first token of each block, in fp64 for fp64 and otherwise in fp32. Callers use the
// returned x from then on. Its gradient becomes that of x: the gradients of first tokens are added
// to some of its rows, in place if nothing else holds it. For a slice, autograd would fill a tensor
// like x with zeros and add all of it.
struct FirstTokens {
  at::Tensor x_BLC, first_BNC;
};
FirstTokens first_of_blocks(const at::Tensor& x_BLC, std::int64_t block);

}  // namespace birkhoff
