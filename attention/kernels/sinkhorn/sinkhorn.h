// From a SortNet's scores to block weights: the Sinkhorn operator and its causal forms.
//
// Legend: scores S [.., N, N], row = destination, column = source, in fp32 or fp64; -inf where a
// pair is masked. All results are >= 0. They are 0 where the score is -inf, and in rows without a
// finite score. One iteration is a column step, then a row step, as in section 3.1.1 of Tay et al.
// 2020. The last step is a row step, so each row is a convex combination of sources. Gradients are
// exact for the iterations made (no convergence is assumed), and never NaN where scores are not. A
// NaN score makes all weights of its matrix NaN. When no gradient is needed, memory does not grow
// with the iterations.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <utility>

#include "attention/kernels/common/path.h"

namespace birkhoff {

// The kernels (kFused) take fp32 and fp64 on the CPU. Matrices outside their number range go
// through the log domain one size at a time: they cost time but little memory. On a GPU the kernels
// take fp32, up to 256 rows and columns (gpu_launch.cu, gpu_prefix.cu, gpu_cumulative.cu), and find
// such matrices themselves; other problems take the reference. kSdpa is the reference.

// The ordinary operator on [.., R, C]: P = exp(S + f + g) with potentials f (rows) and g (columns).
at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, Path limit);

struct BalancedWeights {
  at::Tensor p;
  // P as mixing on a GPU takes it (block_mix.h): in a 16-bit dtype, rows padded with zeros to a
  // multiple of 8 columns. It has no gradient. Undefined: nothing has been rounded.
  at::Tensor rounded{};
};

// balance(). If a kernel on a GPU computes it, the kernel also rounds P to bf16 or fp16.
BalancedWeights balance_and_round(const at::Tensor& scores, std::int64_t iterations,
                                  at::ScalarType dtype, Path limit);

// Returns [.., N - first_row, N] for scores [.., N, N]. Row u, for u >= first_row, is the last row
// of balance() on destinations 1..u and sources 0..u-1. Row 0 is 0: the first destination has no
// source, and it does not take part in any other row's balance either. Exactly causal.
at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          Path limit);

// Forward and backward of balance() (`prefix`: of prefix_balance()) with kFused, for callers that
// save the intermediate tensors themselves. Matrices outside the kernel's number range are solved
// in the log domain, one size at a time, and again in the backward pass: extra memory is a few
// copies of S, however many sizes there are. CPU only, without autograd. Returns P and bool
// `solved` [.., 1 or N - first_row, 1], true where the kernel could solve the problem.
std::pair<at::Tensor, at::Tensor> fused_balance_forward(const at::Tensor& scores,
                                                        std::int64_t iterations, bool prefix,
                                                        std::int64_t first_row);
// dLoss/dS given d_p = dLoss/dP.
at::Tensor fused_balance_backward(const at::Tensor& d_p, const at::Tensor& scores,
                                  const at::Tensor& solved, std::int64_t iterations, bool prefix,
                                  std::int64_t first_row);

// The column factors of row u sum over destinations u' <= u only. Each row shares its mass with a
// null source of score 0, which is then dropped, so rows sum to less than 1. Scores must be -inf
// for v >= u.
at::Tensor cumulative_balance(const at::Tensor& scores, std::int64_t iterations, Path limit);

// Softmax over the sources and a null source of score 0, which is then dropped.
at::Tensor softmax_with_null(const at::Tensor& scores);

}  // namespace birkhoff
