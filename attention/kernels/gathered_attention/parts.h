// Softmax attention in parts: each part covers some of the keys that a query sees, and parts merge
// into the softmax over all of them. Legend: B batch, H heads, L queries, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace birkhoff {

// For logits s_ij: max_i = max_j s_ij, sum_i = sum_j exp(s_ij - max_i). The log-sum-exp of a query
// is max + log(sum); they are separate because a single value would lose the digits of large logits
// to rounding. A query that sees no key has out = max = sum = 0; one that sees NaN has max = 0 and
// sum = NaN.
struct AttentionPart {
  at::Tensor out_BHLD;
  // fp32, or fp64 if out is. Gradients flow through `sum`, as though `max` were a constant.
  at::Tensor max_BHL, sum_BHL;
};

// One softmax over the keys of all parts, which have the same queries; a key in two parts counts
// twice. Any grouping gives the same up to rounding. Plain LibTorch operations, differentiable.
AttentionPart merge_parts(const std::vector<AttentionPart>& parts);

// The part with a sink, a logit with value 0 that takes part in the softmax of each head: [H].
// Queries that see no key stay as they are. Plain LibTorch operations, differentiable.
AttentionPart with_sink(const AttentionPart& part, const at::Tensor& sink_H);

}  // namespace birkhoff
