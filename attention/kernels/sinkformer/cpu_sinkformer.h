// Doubly stochastic attention of one head of one sequence. Works on raw pointers, without LibTorch;
// sinkformer.cpp calls it. Formulas and letters: sinkformer.h.
//
// Every pass computes the scores again, tile by tile, so memory does not grow with n m. With
// G_ij = c_ij d_out_i . v_j (c_ij: dropout's factor) and delta_i = d_out_i . out_i, the unrolled
// backward pass is
//   d_g_j^(T-1) = sum_i P_ij (G_ij - delta_i),
//   d_f_i^(t-1) = - sum_j W_ij^t d_g_j^t  (t even),
//   d_g_j^(t-1) = - sum_i W_ij^t d_f_i^t  (t odd),
//   d_S_ij = P_ij (G_ij - delta_i) - sum_t W_ij^t (d_g_j^t if t is even, else d_f_i^t),  t < T,
// where W^t = exp(S + the potentials of t and t - 1), times m / n if t is even: rows (t odd) or
// columns (t even) that sum to 1. The implicit one has a single pair of terms with W = P:
//   d_S_ij = P_ij (G_ij - delta_i) - P_ij (x_j - (P x)_i),   (diag(P^T 1) - P^T P) x = d_g^(T-1).
#pragma once

#include <cstddef>

#include "attention/kernels/tile_attention/cpu_head.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {

// The gradient of the scores through the potentials.
enum class BalanceGradient {
  kUnrolled,   // exact for the T half-steps made
  kImplicit,   // of the limit T -> infinity, by the implicit function theorem; wrong far from it
  kTruncated,  // g counts as a constant, as in the published code for text
};

constexpr int kMaxHalfSteps = 999;

struct SinkformerShape : HeadShape {
  int half_steps = 1;  // odd, at most kMaxHalfSteps
  BalanceGradient gradient = BalanceGradient::kUnrolled;
  // Weights of a head that take at most this many bytes stay in scratch. It is about a thread's
  // share of the outer caches. Otherwise each pass computes them again.
  std::size_t max_cached_bytes = std::size_t{16} << 20;
};

// Writes `out` and gradients of the rows that exist.
template <typename T>
struct SinkformerHead : AttentionHead<T> {
  // f^1, f^3, .. [(T + 1) / 2, L] and g^2, g^4, .. [(T - 1) / 2, S], written by forward, read by
  // backward.
  Sum<T>*row_potentials = nullptr, *column_potentials = nullptr;
  // out before it is rounded, [L, D]: written by forward (null: not wanted), read by backward.
  Sum<T>* exact_out = nullptr;
};

template <typename T>
struct SinkformerKernels {
  std::size_t (*scratch_bytes)(const SinkformerShape& shape);
  // `scratch` has scratch_bytes(), aligned to 64, uninitialized. Equal arguments give equal bits.
  void (*forward)(const SinkformerShape& shape, const SinkformerHead<T>& head, void* scratch);
  void (*backward)(const SinkformerShape& shape, const SinkformerHead<T>& head, void* scratch);
};

// For T = float, double and Bf16, which is computed in float.
template <typename T>
const SinkformerKernels<T>& sinkformer_kernels(InstructionSet set);

// Defined in cpu_sinkformer.simd.cpp, compiled for kSet.
template <InstructionSet kSet, typename T>
const SinkformerKernels<T>& compiled_sinkformer_kernels();

}  // namespace birkhoff
