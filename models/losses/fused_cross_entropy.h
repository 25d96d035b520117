// Cross entropy with its gradient, in the memory of the logits: of the two tensors of N V numbers
// that log-softmax and its backward would store in fp32, none exists.
//
// Legend: N rows (tokens), V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// Returns losses [N] in nats: -log softmax(logits)[n, target], 0 for rows whose mask is 0. logits
// [N, V], contiguous, become dSum/dlogits, Sum being the sum of all losses; rows with mask 0 become
// 0, and their targets are never read. targets_N: int64, mask_N: u8, contiguous. Arithmetic and
// losses in fp32 (fp64 for fp64 logits). A target outside [0, V) gives the loss NaN on a GPU, an
// error on the CPU. Local; on a CUDA device asynchronous on the current stream. Deterministic.
at::Tensor fused_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                                const at::Tensor& mask_N);

// d_NV *= factor, a scalar in fp32 on the same device (fp64 for fp64 d). On a GPU d is not touched
// where it is 1. Local; asynchronous on the current stream.
void scale_gradients_(at::Tensor d_NV, const at::Tensor& factor);

// fused_cross_entropy_ in LibTorch operations, on any device and in any floating dtype: the
// specification.
at::Tensor reference_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                                    const at::Tensor& mask_N);

}  // namespace birkhoff
