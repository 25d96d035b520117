// Cross entropy and its gradient, computed in the memory of the logits. This avoids the two fp32
// tensors of N V numbers that log-softmax and its backward pass would store.
//
// With label smoothing e (Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer
// Vision", section 7) the targets are the distribution (1 - e) [v = target] + e / V:
//
//   nats[n] = -log p[n, target]      loss[n] = (1 - e) nats[n] - e / V sum over v of log p[n, v]
//
// Legend: N rows (tokens), V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// Of each row; 0 for rows whose mask is 0.
struct RowLosses {
  at::Tensor nats_N;
  at::Tensor losses_N;  // the same tensor without label smoothing
};

// Overwrites logits ([N, V], contiguous) with dSum/dlogits, where Sum is the sum of all losses;
// rows with mask 0 become 0, and their targets are never read. targets_N: int64, mask_N: u8,
// contiguous. Arithmetic and losses in fp32 (fp64 for fp64 logits). The loss of a target outside
// [0, V) is NaN on a GPU; on the CPU such a target is an error. Local; on a CUDA device
// asynchronous on the current stream. Deterministic.
RowLosses fused_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                               const at::Tensor& mask_N, double label_smoothing = 0);

// d_NV *= factor, where factor is an fp32 scalar on the same device (fp64 for fp64 d). On a GPU a
// factor of 1 leaves d untouched. Local; asynchronous on the current stream.
void scale_gradients_(at::Tensor d_NV, const at::Tensor& factor);

// The specification: fused_cross_entropy_ in LibTorch operations, on any device and in any floating
// dtype.
RowLosses reference_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                                   const at::Tensor& mask_N, double label_smoothing = 0);

}  // namespace birkhoff
