// The paths of attention in blocks. Callers that want the fastest call attend_in_blocks(); here are
// those that want one of them. Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// Path::kReference: plain operations on the keys of each block side by side.
at::Tensor attend_reference(const BlockAttention& in);

// Path::kSdpa: the same keys through LibTorch's fused attention, blocks as batch. Without bias and
// dropout.
at::Tensor attend_sdpa(const BlockAttention& in);

// Path::kFused, for what choose_path() gives to it: the kernels of tile_attention/cpu_loop.h on the
// CPU and of gpu_params.h on a GPU. No concatenated keys, no stored probabilities. The same bits
// each time, for any number of threads. Asynchronous on a CUDA device's current stream; on the CPU
// noise is read when this is called.
at::Tensor attend_fused(const BlockAttention& in);

// Forward and backward of attend_fused (single softmax), for callers that save the intermediate
// tensors themselves.
BlockResults fused_forward(const BlockAttention& in);
// Gradients of q, then of k and v of each of in.keys, then of the biases that there are (of 5
// dims), given the forward pass's `in` and results.
std::vector<at::Tensor> fused_backward(const BlockAttention& in, const BlockResults& results,
                                       const at::Tensor& d_out_BHNbD);

}  // namespace birkhoff
