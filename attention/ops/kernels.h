// What the operators for PyTorch compute, without autograd and without the dispatcher: attention in
// blocks and block weights as functions of tensors. The fused kernels where they fit, else
// LibTorch's operations, whose backward pass runs the forward pass again.
//
// Legend: B batch, H heads, L tokens, N = ceil(L / b) blocks of b tokens, D head dim. q, k, v,
// d_out and gradients [B, H, L, D], of one dtype on one device; weights and scores [B, H, N, N],
// row = destination, column = source. Wrong shapes or values: c10::Error, of Python's ValueError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <tuple>

namespace birkhoff::ops {

// Results are laid out as at::empty_like(q) is, gradients as empty_like of what they belong to. The
// second result is what the backward pass needs of the softmax: [2, B, H, N, b], at least fp32.

// Queries see their own block, `look_back` blocks before it and `look_ahead` after it; if causal,
// no key behind their own (and look_ahead is 0).
std::tuple<at::Tensor, at::Tensor> block_local_attention(const at::Tensor& q, const at::Tensor& k,
                                                         const at::Tensor& v, std::int64_t block,
                                                         std::int64_t look_back,
                                                         std::int64_t look_ahead, bool causal);
std::tuple<at::Tensor, at::Tensor, at::Tensor> block_local_attention_backward(
    const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax, std::int64_t block, std::int64_t look_back,
    std::int64_t look_ahead, bool causal);

// Queries see their own block (if causal, up to themselves) and its sorted block: the blocks of k
// and v mixed with the weights of the block's row; if causal, those of earlier blocks alone are
// read, and block 0 has none. One softmax over both (Tay et al. 2020, section 3). L need not be a
// multiple of b if causal.
std::tuple<at::Tensor, at::Tensor> sorted_attention(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& weights,
                                                    std::int64_t block, bool causal);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sorted_attention_backward(
    const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& weights, const at::Tensor& out, const at::Tensor& softmax, std::int64_t block,
    bool causal);

// Weights from scores in fp32 or fp64. `form`: "full", the ordinary balance, for encoders; and the
// exactly causal "prefix", "cumulative" and "none" of configs/attention.proto. The second result is
// what the kernel could solve, bool [B, H, N or 1, 1].
std::tuple<at::Tensor, at::Tensor> sinkhorn_balance(const at::Tensor& scores,
                                                    std::int64_t iterations, std::string_view form);
at::Tensor sinkhorn_balance_backward(const at::Tensor& d_weights, const at::Tensor& scores,
                                     const at::Tensor& solved, std::int64_t iterations,
                                     std::string_view form);

}  // namespace birkhoff::ops
