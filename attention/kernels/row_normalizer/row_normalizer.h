// The step from a query's scores to the weights of its keys: softmax, or one of its sparse
// relatives.
//
// Legend: B batch, H heads, L queries, S keys. Of the scores z of the keys that a query sees:
//   softmax:    p_j proportional to exp(z_j)
//   top-k:      softmax over the k largest (Zhao et al. 2019, "Explicit Sparse Transformer",
//               section 2.2); the rest gets 0
//   sparsemax:  p_j = max(z_j - t, 0) (Martins and Astudillo 2016)
//   entmax:     p_j = max((a - 1) z_j - t, 0)^(1 / (a - 1)) for an exponent a in (1, 2] (Peters et
//               al. 2019; a learned one: Correia et al. 2019). a = 2 is sparsemax, a -> 1 softmax.
// where t is such that the weights sum to 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

enum class Normalizer { kSoftmax, kTopK, kSparsemax, kEntmax15, kEntmax };

struct RowNormalizer {
  Normalizer kind = Normalizer::kSoftmax;
  // kTopK: k is the larger of top_k and, if top_divisor > 0, the number of visible keys divided by
  // it, rounded up. Of equal scores those of the first keys are kept or, with keep_ties, all that
  // equal the k-th (the published rule).
  std::int64_t top_k = 0, top_divisor = 0;
  bool keep_ties = false;
  at::Tensor alpha_H{};  // kEntmax: the exponent of each head; may require gradients
};

// The weights of scores [B, H, L, S] where `mask` (bool, broadcastable) is true; 0 elsewhere, and
// in rows without a visible key. Undefined `mask`: true everywhere. `sink` [H], if defined, is one
// more visible score, which top-k always keeps and whose weight is not returned. Computed in fp32
// or wider, returned in the scores' dtype. Differentiable; the choice of top-k counts as a
// constant.
at::Tensor normalize_rows(const RowNormalizer& normalizer, const at::Tensor& scores_BHLS,
                          const at::Tensor& mask, const at::Tensor& sink_H);

}  // namespace birkhoff
