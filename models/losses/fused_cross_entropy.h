// Cross entropy and its gradient, computed in the memory of the logits. This avoids the two fp32
// tensors of N V numbers that log-softmax and its backward pass would store.
//
// Legend: N rows (tokens), V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// Returns the losses [N] in nats: -log softmax(logits)[n, target], or 0 for rows whose mask is 0.
// Overwrites logits ([N, V], contiguous) with dSum/dlogits, where Sum is the sum of all losses;
// rows with mask 0 become 0, and their targets are never read. targets_N: int64, mask_N: u8,
// contiguous. Arithmetic and losses in fp32 (fp64 for fp64 logits). The loss of a target outside
// [0, V) is NaN on a GPU; on the CPU such a target is an error. Local; on a CUDA device
// asynchronous on the current stream. Deterministic.
at::Tensor fused_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                                const at::Tensor& mask_N);

// d_NV *= factor, where factor is an fp32 scalar on the same device (fp64 for fp64 d). On a GPU a
// factor of 1 leaves d untouched. Local; asynchronous on the current stream.
void scale_gradients_(at::Tensor d_NV, const at::Tensor& factor);

// The specification: fused_cross_entropy_ in LibTorch operations, on any device and in any floating
// dtype.
at::Tensor reference_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                                    const at::Tensor& mask_N);

}  // namespace birkhoff
