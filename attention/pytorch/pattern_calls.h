// The computations of the operators of attention in patterns, as in calls.h: the Sparse
// Transformer's, and sorted blocks that all queries share. Their backward passes run the forward
// pass again.
//
// Legend: calls.h; S keys, N blocks of keys, n shared blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

// Attention in a pattern of attention/kernels/sparse_patterns/sparse_pattern.h. `pattern` is
// "fixed" or "strided"; `part` is "merged" or "second". A summary longer than the stride is cut to
// it.
struct AttentionInPattern {
  static constexpr char kName[] = "_attention_in_pattern";
  static constexpr char kOptions[] =
      "int stride, int summary, str pattern, str part, bool causal, Tensor? key_lengths, "
      "Tensor? segments";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 1;

  std::int64_t stride, summary;
  std::string_view pattern, part;
  bool causal;
  OptionalTensor key_lengths, segments;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

// Attention of all queries to sorted blocks of k and v [B, H, S, D], and with `local` to their own
// block (SharedBlocks of sorted_blocks.h). `inputs` end with the weights [B, H, n, N]; those of
// blocks that are all padding count as 0. With `local`, S is L.
struct AttentionToSharedBlocks {
  static constexpr char kName[] = "_attention_to_shared_blocks";
  static constexpr char kOptions[] =
      "int block, bool local, float dropout, Tensor? seed, Tensor? key_lengths";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 1;

  std::int64_t block;
  bool local;
  double dropout;
  OptionalTensor seed, key_lengths;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

}  // namespace birkhoff::ops
