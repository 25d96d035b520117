// The paths of block attention, for callers that need a particular one. Callers that want the
// fastest path use attend_in_blocks(). Legend: B batch, H heads, N blocks, b tokens per block, D
// head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// Path::kReference: plain operations on each block's concatenated keys.
at::Tensor attend_reference(const BlockAttention& in);

// Path::kSdpa: LibTorch's fused attention on the same keys, with blocks as batch. No bias and no
// dropout.
at::Tensor attend_sdpa(const BlockAttention& in);

// Path::kFused, for input for which choose_path() returns it: the kernels of
// tile_attention/cpu_loop.h on the CPU and of gpu_params.h on a GPU. Keys are not concatenated and
// probabilities are not stored. The same bits each time, for any number of threads. Asynchronous on
// a CUDA device's current stream; on the CPU noise is read during the call.
at::Tensor attend_fused(const BlockAttention& in);

// Forward and backward of attend_fused (single softmax), for callers that save the intermediate
// tensors themselves.
BlockResults fused_forward(const BlockAttention& in);
// Returns the gradients of q, then of k and v of each entry of in.keys (undefined where another
// entry is owner_of_gradients()), then of each entry's bias (which must have 5 dims) and weights
// that are defined, then of the defined ones of relative.keys_HRD, relative.values_HRD, sink_H
// and relative.bias_HR, given the forward pass's `in` and results.
std::vector<at::Tensor> fused_backward(const BlockAttention& in, const BlockResults& results,
                                       const at::Tensor& d_out_BHNbD);

}  // namespace birkhoff
