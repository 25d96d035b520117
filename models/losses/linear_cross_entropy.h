// Cross entropy of an output layer's logits, which are computed for some rows at a time, so that no
// more than 2^26 exist (on a GPU, 2^29). In training the gradients of these rows are computed at
// once, in the memory of their logits.
//
// Legend: N rows (tokens), E columns, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/losses/loss_sums.h"

namespace birkhoff {

struct LinearCrossEntropy {
  LossSums sums;
  // bool [N]: the target is the id with the largest logit, of equal ones the smallest.
  at::Tensor correct_N;  // undefined if it was not asked for
};

// cross_entropy_sums() of the logits x W^T: x [N, E] and W [V, E] in one dtype, in which the logits
// and the gradients of single rows are rounded; sums over rows are not. N may be 0. targets_N and
// mask_N as of fused_cross_entropy_(). Local.
LinearCrossEntropy linear_cross_entropy(const at::Tensor& x_NE, const at::Tensor& weight_VE,
                                        const at::Tensor& targets_N, const at::Tensor& mask_N,
                                        double label_smoothing, bool with_correct);

}  // namespace birkhoff
