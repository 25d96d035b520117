// From a SortNet's scores to block weights: the Sinkhorn operator and its causal forms.
//
// Legend: scores S [.., N, N], row = destination, column = source, in fp32 or fp64; -inf where a
// pair is barred. All results are >= 0, and 0 where the score is -inf; a row without a finite score
// is 0. One iteration is a column step, then a row step, as in section 3.1.1 of Tay et al. 2020:
// results end on the row step, so each row is a convex mix of sources. Gradients are exact for the
// iterations made (no convergence assumed) and never NaN where scores are not. NaN of a score makes
// all weights of its matrix NaN. Where no gradient is asked for, memory does not grow with the
// iterations.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "attention/kernels/common/path.h"

namespace birkhoff {

// The kernels, kFused, take on the CPU fp32 and fp64; matrices outside their number range go
// through the log domain one by one, so that they cost time but no memory. On a GPU they take fp32,
// up to 256 rows and columns (gpu_launch.cu, gpu_prefix.cu), and find such matrices by themselves;
// others take the reference, as does the cumulative balance there. kSdpa: the reference.

// The ordinary operator on [.., R, C]: P = exp(S + f + g) with potentials f (rows) and g (columns).
at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, Path limit);

// Row u of the result, for u >= first_row, is the last row of balance() on destinations 1..u and
// sources 0..u-1 of [.., N, N]; 0 for u = 0: the first destination has no source, and takes no part
// in others' balance either. [.., N - first_row, N]; exactly causal.
at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          Path limit);

// The two passes of balance (`prefix`: prefix_balance) on kFused, for who keeps by himself what
// lies between them. The kernel, and the log domain for the matrices outside its number range:
// those are solved size by size, and again in the backward pass, so what they need besides inputs
// and outputs is a few times S, however many sizes there are. On the CPU, without autograd. P, and
// bool `solved` [.., 1 or N - first_row, 1]: what the kernel could solve.
std::pair<at::Tensor, at::Tensor> fused_balance_forward(const at::Tensor& scores,
                                                        std::int64_t iterations, bool prefix,
                                                        std::int64_t first_row);
// dLoss/dS given d_p = dLoss/dP.
at::Tensor fused_balance_backward(const at::Tensor& d_p, const at::Tensor& scores,
                                  const at::Tensor& solved, std::int64_t iterations, bool prefix,
                                  std::int64_t first_row);

// Column factors of row u sum over destinations u' <= u only; rows share their mass with a null
// source of score 0, which is dropped, so they sum to less than 1. Expects -inf for v >= u.
at::Tensor cumulative_balance(const at::Tensor& scores, std::int64_t iterations, Path limit);

// Softmax over the sources and a null source of score 0, which is dropped.
at::Tensor softmax_with_null(const at::Tensor& scores);

}  // namespace birkhoff
