// Arguments of the kernel that sums squares chunk by chunk. See
// runtime/gradients/gpu_chunk_sums.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct ChunkSumsParams {
  const void* x;  // [elements], fp32 or bf16
  KernelDtype dtype;
  std::int64_t elements;
  double* sums;  // [ceil(elements / kChunk)]

  static constexpr std::int64_t kChunk = 4096;  // as in runtime/gradients/fixed_order.h
};

// Asynchronous on `stream`.
void launch_chunk_sums(const ChunkSumsParams& params, CUstream_st* stream);

}  // namespace birkhoff
