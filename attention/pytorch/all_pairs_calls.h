// The computations of the operators of attention over all pairs of queries and keys, as in calls.h:
// sparse normalizers and doubly stochastic attention.
//
// Legend: calls.h; S keys, which may differ from L where a call allows it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

// Attention with a sparse normalizer (attention/kernels/row_normalizer). The inputs are q, k, v and
// the exponents of entmax [H], in any floating dtype, which have a gradient if `learns`; without
// exponents it is top-k with `count` keys. If causal, or with documents, S must be L.
//
// Returns the output, and for the backward pass the kept keys and their weights, or the thresholds
// of entmax. They are zeros, and the forward pass runs again, if the kernels do not take the call.
struct AttentionByRows {
  static constexpr char kName[] = "_attention_by_rows";
  static constexpr char kOptions[] =
      "int count, bool learns, bool causal, float dropout, Tensor? seed, Tensor? key_lengths, "
      "Tensor? segments";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 1;

  std::int64_t count;
  bool learns, causal;
  double dropout;
  OptionalTensor seed, key_lengths, segments;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

// Doubly stochastic attention (attention/kernels/sinkformer) of q, k and v. gradient: "unrolled",
// "implicit" or "truncated" (BalanceGradient). Lengths are int64 [B].
//
// Returns the output, and for the backward pass the output before it is rounded and the potentials
// of rows and columns, zeros as above.
struct DoublyStochasticOperation {
  static constexpr char kName[] = "_doubly_stochastic_attention";
  static constexpr char kOptions[] =
      "int half_steps, str gradient, float dropout, Tensor? seed, Tensor? query_lengths, "
      "Tensor? key_lengths";
  static constexpr std::size_t kOutputs = 1, kFirstSaved = 1;

  std::int64_t half_steps;
  std::string_view gradient;
  double dropout;
  OptionalTensor seed, query_lengths, key_lengths;

  Tensors forward(at::TensorList inputs) const;
  Tensors meta(at::TensorList inputs) const;
  Tensors backward(at::TensorList gradients, at::TensorList inputs, at::TensorList saved) const;
};

}  // namespace birkhoff::ops
