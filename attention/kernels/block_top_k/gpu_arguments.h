// Arguments of the GPU kernel that chooses blocks, made from tensors. Used by block_top_k.cpp.
// Legend: see block_top_k.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/kernels/block_top_k/block_top_k.h"
#include "attention/kernels/block_top_k/gpu_params.h"

namespace birkhoff {

// Why the kernel does not support this, regardless of where its tensors are; empty if it does.
std::string why_not_gpu_kernels(const BlockTopK& choice);

// `params` point to the result and to `arguments`, which must outlive the launch.
struct GpuChoice {
  BlockTopKParams params;
  at::Tensor chosen_BHLC;
  std::vector<at::Tensor> arguments;
};
GpuChoice gpu_top_k(const BlockTopK& choice, const WholeBlocks& blocks);

}  // namespace birkhoff
