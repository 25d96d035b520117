// The computations of the operators for PyTorch, without autograd and without the dispatcher: block
// attention and block weights as functions of tensors. They use the fused kernels where these fit,
// otherwise LibTorch operations, whose backward pass runs the forward pass again.
//
// Legend: B batch, H heads, L tokens, N = ceil(L / b) blocks of b tokens, D head dim, R rows of a
// table. q, k, v, d_out and gradients [B, H, L, D], of one dtype on one device; k and v may have
// fewer heads (common/grouped_queries.h), and then so have weights and scores [B, H, N, N], row =
// destination, column = source. Throws c10::ValueError (in Python: ValueError) on wrong shapes or
// values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace birkhoff::ops {

using OptionalTensor = std::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;

// The inputs of an operator that have gradients, in this order. An input that a call does not have
// is a tensor of sizes [0]; if nothing follows v, the list ends there.
enum Input : std::size_t {
  kQueries,
  kKeys,
  kValues,
  // Relative positions (relative_positions.h), [H or 1, R, D]. Causal: row R - 1 is for the query's
  // own position, earlier rows for earlier keys. Else row (R - 1) / 2 is for its own.
  kRelativeKeys,
  kRelativeValues,
  kSink,  // [H]: a logit with value 0
  kWeights,
};
inline bool is_none(const at::Tensor& x) { return x.dim() == 1 && x.sym_size(0) == 0; }
inline bool has(at::TensorList inputs, std::size_t which) {
  return which < inputs.size() && !is_none(inputs[which]);
}

// ---- Operators with a gradient, which dispatch.h registers. Their members are the options. The
// backward pass gets the gradients of the first kOutputs results, the inputs, and the results from
// kFirstSaved on. meta() is the forward pass of tensors without memory, for tracing.

// As the block size: the whole sequence is one block, however long it is.
constexpr std::int64_t kWholeSequence = 0;

// Attention of queries to the keys of their own block; if causal, up to the query itself. For
// sorted attention `inputs` end with the block weights.
// - Without weights: queries also see `look_back` blocks before their own and `look_ahead` blocks
//   after it; if causal, look_ahead is 0.
// - With weights: queries also see the sorted block (sorted_blocks.h); look_back and look_ahead are
//   not read. Weights of block pairs that causality, padding or documents mask count as 0. Relative
//   positions apply to the own block.
// block: at least 1, or kWholeSequence. combine: "concat", "add_outputs" or "add_logits" (Combine).
// seed: int64, one element; attention dropout then uses NoiseKey{.seed = 0, .step = seed,
// .layer = 0} and samples 0, 1, .. key_lengths: int64 [B], segments: int64 [B, L], as in
// AttentionInput.
//
// Results have the layout of at::empty_like(q). There is one gradient for each of `inputs`, with
// the layout of at::empty_like of that input. The second result is the softmax's maximum and
// inverse sum for the backward pass: [2, B, H, N, b], at least fp32. If the kernels do not take the
// call, or if it has two softmaxes, it is zeros and the backward pass runs the forward pass again.
struct AttentionInBlocks {
  static constexpr char kName[] = "_attention_in_blocks";
  static constexpr char kOptions[] =
      "int block, int look_back, int look_ahead, bool causal, str combine, float dropout, "
      "Tensor? seed, Tensor? key_lengths, Tensor? segments";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 0;

  std::int64_t block = kWholeSequence, look_back = 0, look_ahead = 0;
  bool causal = true;
  std::string_view combine = "concat";
  double dropout = 0;
  OptionalTensor seed, key_lengths, segments;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

// bool [B, 1, N, N]: block pairs that padding and documents leave visible, regardless of causality.
at::Tensor open_block_pairs(const at::Tensor& q, std::int64_t block,
                            const OptionalTensor& key_lengths, const OptionalTensor& segments);

// Computes weights from the only input, scores in fp32 or fp64. `balance` is "full", the ordinary
// balance for encoders, or one of the exactly causal "prefix", "cumulative" and "none" of
// configs/schema/attention.proto. A score of -inf masks its pair. The second result, bool
// [B, H, N or 1, 1], is true where the kernel could solve the problem.
struct SinkhornBalance {
  static constexpr char kName[] = "_sinkhorn_balance";
  static constexpr char kOptions[] = "int iterations, str balance";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 1;

  std::int64_t iterations;
  std::string_view balance;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

}  // namespace birkhoff::ops
