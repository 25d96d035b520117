// Arguments of the GPU kernel that chooses blocks, made from tensors. Used by block_choice.cpp.
// Legend: see block_choice.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/kernels/block_choice/block_choice.h"
#include "attention/kernels/block_choice/gpu_params.h"

namespace birkhoff {

// Why the kernel does not support this, regardless of where its tensors are; empty if it does.
std::string why_not_gpu_kernels(const BlockChoice& choice);

// `params` point to the result and to `arguments`, which must outlive the launch.
struct GpuChoice {
  BlockChoiceParams params;
  at::Tensor chosen_BHLC;
  std::vector<at::Tensor> arguments;
};
GpuChoice gpu_choice(const BlockChoice& choice, const WholeBlocks& blocks);

}  // namespace birkhoff
