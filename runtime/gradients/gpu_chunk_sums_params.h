// Arguments of the kernel that sums squares block by block. See
// runtime/gradients/gpu_chunk_sums.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct BlockSumsParams {
  const void* x;  // [elements], fp32 or bf16
  KernelDtype dtype;
  std::int64_t elements;
  double* sums;  // [ceil(elements / kBlock)]

  static constexpr std::int64_t kBlock = 4096;  // as in runtime/gradients/fixed_order.h
};

// Asynchronous on `stream`.
void launch_block_sums(const BlockSumsParams& params, CUstream_st* stream);

}  // namespace birkhoff
