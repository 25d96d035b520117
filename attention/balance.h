// From a SortNet's scores to block weights: the Sinkhorn operator and its causal forms.
//
// Legend: scores S [.., N, N], row = destination, column = source, in fp32 or fp64; -inf where a
// pair is barred. All results are >= 0, and 0 where the score is -inf; a row without a finite score
// is 0. One iteration is a column step, then a row step, as in section 3.1.1 of Tay et al. 2020:
// results end on the row step, so each row is a convex mix of sources. Gradients are exact for the
// iterations made (no convergence assumed) and never NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// Where a balance runs: the specification in LibTorch operations, or a fused kernel. On the CPU,
// matrices outside the kernel's number range go through the log domain one by one, so that they
// cost time but no memory. On a GPU it takes fp32, up to 256 rows and columns (balance.cu); others
// take the specification, as does the
// cumulative balance there.
enum class BalancePath { kReference, kFused };

// The ordinary operator on [.., R, C]: P = exp(S + f + g) with potentials f (rows) and g (columns).
at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, BalancePath path);

// Row u of the result, for u >= first_row, is the last row of balance() on destinations 0..u and
// sources 0..u-1 of [.., N, N]; 0 for u = 0. [.., N - first_row, N]; exactly causal.
at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          BalancePath path);

// Column factors of row u sum over destinations u' <= u only; rows share their mass with a null
// source of score 0, which is dropped, so they sum to less than 1. Expects -inf for v >= u.
at::Tensor cumulative_balance(const at::Tensor& scores, std::int64_t iterations, BalancePath path);

// Softmax over the sources and a null source of score 0, which is dropped.
at::Tensor softmax_with_null(const at::Tensor& scores);

}  // namespace birkhoff
