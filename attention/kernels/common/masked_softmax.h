// Softmax over the keys a query may see. A query that sees none gets probabilities 0 and no
// gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cluster/base/random/philox.h"

namespace birkhoff {

// Both of two masks; an undefined one allows all.
at::Tensor and_defined(const at::Tensor& a, const at::Tensor& b);

// Softmax over the last dim of scores [..., S] where `legal` (bool, broadcastable) is true, 0
// elsewhere. Taken in fp32 or wider, returned in the scores' dtype. Undefined `legal`: all are.
at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& legal);

// What scaled_dot_product_attention adds to logits for the same effect: 0 where legal, else a
// finite number that no logit outweighs. Rows without a legal key come out as plain means and must
// be zeroed by the caller.
at::Tensor additive_mask(const at::Tensor& legal, at::ScalarType dtype);

// LibTorch's scaled_dot_product_attention, without dropout: `mask` as of additive_mask(), or
// `causal`. On the CPU LibTorch gives 0 where all logits of a query are NaN; there this computes by
// plain operations, and NaN stays NaN.
at::Tensor library_attention(const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                             const at::Tensor& v_BHSD,
                             const std::optional<at::Tensor>& mask = std::nullopt,
                             bool causal = false);

// Attention dropout: probabilities [B, ...] with noise of their own, or unchanged without noise.
at::Tensor drop_probabilities(const at::Tensor& probabilities, float dropout,
                              const std::optional<NoiseKey>& noise);

}  // namespace birkhoff
