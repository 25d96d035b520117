// Softmax over the keys that are visible to a query. A query that sees none gets probabilities 0
// and no gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cluster/base/random/philox.h"

namespace birkhoff {

// The logical and of two masks; an undefined mask hides no key.
at::Tensor and_defined(const at::Tensor& a, const at::Tensor& b);

// Softmax over the last dim of scores [..., S] where `mask` (bool, broadcastable) is true; 0
// elsewhere. Computed in fp32 or wider, returned in the scores' dtype. Undefined `mask`: true
// everywhere. A defined `sink` (broadcastable to [..., 1]) is one more logit, whose probability is
// not returned.
at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& mask,
                          const at::Tensor& sink = {});

// The mask in the form that scaled_dot_product_attention adds to logits: 0 where visible, else a
// finite value that no logit outweighs. Rows without a visible key come out as plain means; the
// caller must zero them.
at::Tensor additive_mask(const at::Tensor& mask, at::ScalarType dtype);

// LibTorch's scaled_dot_product_attention, without dropout. Takes `bias`, an additive_mask(), or
// `causal`. On the CPU LibTorch returns 0 for a query whose logits are all NaN. This function uses
// plain operations there if q or k holds NaN, so that NaN stays NaN. Keys may have fewer heads than
// queries (grouped_queries.h); then `bias` has one head or the queries' heads.
at::Tensor library_attention(const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                             const at::Tensor& v_BHSD,
                             const std::optional<at::Tensor>& bias = std::nullopt,
                             bool causal = false);

// Attention dropout on probabilities [B, ...], with its own random stream. Without noise they stay
// unchanged.
at::Tensor drop_probabilities(const at::Tensor& probabilities, float dropout,
                              const std::optional<NoiseKey>& noise);

}  // namespace birkhoff
