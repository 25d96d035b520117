// Doubly stochastic attention (Sander et al. 2022, "Sinkformers: Transformers with Doubly
// Stochastic Attention", section 3). The softmax over keys is the first half-step of Sinkhorn's
// algorithm on exp(scores); further half-steps normalize columns and rows in turn.
//
// Legend: B batch, H heads, L queries, S keys, D head dim, n queries and m keys that exist.
//
// For S_ij = q_i . k_j / sqrt(D), g^0 = 0, t = 1, 3, .. (rows) and t = 2, 4, .. (columns):
//   f_i^t = - log sum_j exp(S_ij + g_j^(t-1)),
//   g_j^t = log(n / m) - log sum_i exp(S_ij + f_i^(t-1)),
//   P = exp(S + f^T + g^(T-1)),   out = P v.
// T is odd, so rows sum to 1; columns sum to n / m in the limit. T = 1 is softmax. Only the
// potentials f and g are stored, never an L x S matrix, except on the reference path.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/kernels/common/path.h"
#include "attention/kernels/sinkformer/cpu_sinkformer.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

struct DoublyStochasticAttention {
  at::Tensor q_BHLD;
  at::Tensor k_BHSD, v_BHSD;  // H or a divisor of it (common/grouped_queries.h)
  // int64: n and m of each sequence; the rest is padding, whose outputs and gradients are 0.
  // Undefined: L and S.
  at::Tensor query_lengths_B, key_lengths_B;
  // bool: pairs of a query and a key of the same document; each document is balanced on its own.
  // Undefined: one document.
  at::Tensor same_document_BLS;
  int half_steps = 1;  // T, odd, at most kMaxHalfSteps
  BalanceGradient gradient = BalanceGradient::kUnrolled;
  float dropout = 0;  // of P, by `noise`, which may be absent
  std::optional<NoiseKey> noise;
};

// kFused or kReference, and why nothing is faster.
PathChoice choose_path(const DoublyStochasticAttention& in, Path limit);

// [B, H, L, D], in the dtype of q. Error(kInternal) if T is not allowed.
at::Tensor attend_doubly_stochastic(DoublyStochasticAttention in, Path limit);

// ---- The passes of the CPU kernels without autograd. Here k and v have H heads.

struct SinkformerResults {
  at::Tensor out_BHLD;
  // For the backward pass, at least fp32, 0 in padding: the unrounded output, and the potentials
  // f^1, f^3, .. [(T + 1) / 2] and g^2, g^4, .. [(T - 1) / 2].
  at::Tensor exact_out_BHLD, rows_BHtL, columns_BHtS;
};

SinkformerResults fused_forward(const DoublyStochasticAttention& in);
// The gradients of q, k and v. Does not read results.out_BHLD.
std::vector<at::Tensor> fused_backward(const DoublyStochasticAttention& in,
                                       const SinkformerResults& results,
                                       const at::Tensor& d_out_BHLD);

}  // namespace birkhoff
