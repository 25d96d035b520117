// The conversion of tensors to arguments of the GPU's kernels of doubly stochastic attention
// (gpu_params.h). Legend: B batch, H heads, L queries, S keys, D head dim, T half-steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attention/kernels/sinkformer/gpu_params.h"
#include "attention/kernels/sinkformer/sinkformer.h"
#include "attention/kernels/tile_attention/cpu_heads.h"

namespace birkhoff {

// Why the kernels do not support this, regardless of where its tensors are; empty if they do. They
// support bf16 or fp16, D a multiple of 8 and at most 128, one document, no dropout, and not the
// implicit gradient.
std::string why_not_gpu_kernels(const DoublyStochasticAttention& in);

// fp32 vectors of each half-step of queries, T / 2 + 1, and of keys, T / 2: [B, H, vectors, L or S
// rounded up to whole tiles]. The forward pass writes the potentials and the backward pass reads
// them; the backward pass needs as many coefficients as scratch.
struct SinkformerVectors {
  at::Tensor queries_BHtL, keys_BHtS;
};
SinkformerVectors new_sinkformer_vectors(const HeadTensors& x, int half_steps);

// The kernels' arguments for the forward pass. Rows must be aligned (common/fitting_rows.h),
// lengths contiguous and on the device; all tensors must outlive the launch.
SinkformerParams sinkformer_params(const HeadTensors& x, int half_steps,
                                   const SinkformerVectors& potentials);
// The same for the backward pass. `unrolled`: BalanceGradient::kUnrolled, not kTruncated.
SinkformerParams sinkformer_params(const HeadTensors& x, int half_steps,
                                   const SinkformerVectors& potentials, bool unrolled,
                                   const SinkformerVectors& coefficients);

}  // namespace birkhoff
