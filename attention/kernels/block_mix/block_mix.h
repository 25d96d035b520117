// Block mixing: each destination block is a weighted sum of source blocks. mix_lower_blocks() is
// for weights that are 0 above a diagonal, where a block sees only earlier ones. Legend: B batch, H
// heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/common/path.h"

namespace birkhoff {

// Returns the block mixes sum_v weights_uv x_v [B, H, U, b, D], for weights [B, H, U, N] and
// x [B, H, N, b, D].
at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD);

struct BlockMixes {
  std::vector<at::Tensor> y_BHNbD;  // same layout as x, one block for each mix
  // x itself, for its other consumers. If they read it from here, their gradients reach x through
  // the mix, whose backward kernel adds them to its own. Autograd would need a separate pass over
  // memory for that. Second gradients are not supported.
  std::vector<at::Tensor> x_BHNbD;
};

// Padding that the kernels of a GPU leave out by themselves, so that x needs no copy with zeros.
struct MixPadding {
  // int64: tokens at lengths_b and after are padding; x counts as 0 there. Undefined: none.
  at::Tensor lengths_B;
  // In the fp32 of the weights: weights of the tokens that the last block of a sample lacks, 0 for
  // this block. All weights are 0 for blocks of padding.
  at::Tensor weights_BHNN;
};

// For each x [B, H, N, b, D], computes y_u = sum over v <= u + diagonal of weights_uv x_v, with
// weights rounded to the dtype of x. `diagonal` is as in at::tril (-1: only earlier blocks; N-1:
// all). Weights [B, H, N, N] (B or H may be 1), in the dtype of x or fp32, must be 0 above the
// diagonal and get no gradient there. Twice as fast as mix_blocks where half of the weights are 0.
// There are kernels for fp32, fp64 and bf16 on the CPU and for bf16 and fp16 on a GPU (gpu_mix.h),
// with sums in fp32 at least; other problems take GEMMs, each as wide as its rows need. Below
// Path::kFused: mix_blocks of each x. `rounded`, which may be undefined, saves the kernels for GPUs
// from rounding: weights in the dtype of x, rows padded with zeros to a multiple of 8 columns.
// `padding` is only for x that leaves_padding_out().
BlockMixes mix_lower_blocks(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                            std::int64_t diagonal, Path limit, const at::Tensor& rounded = {},
                            const MixPadding& padding = {});

// Whether a GPU would be faster if it read only few sources of each block. Its kernels read every
// block once, and memory limits them up to a number of blocks (docs/benchmarks/gpu.md).
bool few_sources_would_save(const std::vector<at::Tensor>& x_BHNbD);

// Whether mix_lower_blocks() takes padding of these x with paths up to `limit`.
bool leaves_padding_out(const std::vector<at::Tensor>& x_BHNbD, Path limit);

}  // namespace birkhoff
