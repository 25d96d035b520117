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
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace birkhoff::ops {

// As a block: a sequence is one block, however long it is.
constexpr std::int64_t kWholeSequence = 0;

// Attention of queries to keys of their own block, up to themselves if causal. `inputs`: q, k and
// v, and of sorted attention the block weights.
// - q, k, v: queries see `look_back` blocks before their own and `look_ahead` after it besides; if
//   causal, look_ahead is 0.
// - With weights: they see the sorted block besides (sorted_blocks.h); look_back and look_ahead are
//   not read. Pairs of blocks that causality, padding or documents bar count as weight 0.
// block: at least 1, or kWholeSequence. combine: "concat", "add_outputs" or "add_logits" (Combine).
// seed: int64, one element; attention dropout is then that of NoiseKey{.seed = 0, .step = seed,
// .layer = 0} and samples 0, 1, .. key_lengths: int64 [B], segments: int64 [B, L], as in
// AttentionInput.
//
// Results are laid out as at::empty_like(q) is, gradients, one for each of `inputs`, as empty_like
// of what they belong to. The second result is what the backward pass needs of the softmax:
// [2, B, H, N, b], at least fp32; where the kernels do not take the call, or it has two softmaxes,
// zeros, and the backward pass runs the forward pass again.
std::tuple<at::Tensor, at::Tensor> attention_in_blocks(
    at::TensorList inputs, std::int64_t block, std::int64_t look_back, std::int64_t look_ahead,
    bool causal, std::string_view combine, double dropout, const std::optional<at::Tensor>& seed,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& segments);
std::vector<at::Tensor> attention_in_blocks_backward(
    const at::Tensor& d_out, at::TensorList inputs, const at::Tensor& out,
    const at::Tensor& softmax, std::int64_t block, std::int64_t look_back, std::int64_t look_ahead,
    bool causal, std::string_view combine, double dropout, const std::optional<at::Tensor>& seed,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& segments);

// bool [B, 1, N, N]: pairs of blocks that padding and documents allow, causality apart.
at::Tensor open_block_pairs(const at::Tensor& q, std::int64_t block,
                            const std::optional<at::Tensor>& key_lengths,
                            const std::optional<at::Tensor>& segments);

// Weights from scores in fp32 or fp64. `form`: "full", the ordinary balance, for encoders; and the
// exactly causal "prefix", "cumulative" and "none" of configs/attention.proto. A score of -inf bars
// its pair. The second result is what the kernel could solve, bool [B, H, N or 1, 1].
std::tuple<at::Tensor, at::Tensor> sinkhorn_balance(const at::Tensor& scores,
                                                    std::int64_t iterations, std::string_view form);
at::Tensor sinkhorn_balance_backward(const at::Tensor& d_weights, const at::Tensor& scores,
                                     const at::Tensor& solved, std::int64_t iterations,
                                     std::string_view form);

}  // namespace birkhoff::ops
