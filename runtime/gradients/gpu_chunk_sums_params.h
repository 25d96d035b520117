// Arguments of the kernel that sums squares chunk by chunk. See
// runtime/gradients/gpu_chunk_sums.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// Several tensors, whose sums follow one another.
struct ChunkSumsParams {
  static constexpr std::int64_t kChunk = 4096;  // as in runtime/gradients/fixed_order.h
  static constexpr int kMaxTensors = 64;

  KernelDtype dtype;  // of all elements: fp32 or bf16
  int num_tensors;
  struct Tensor {
    const void* x;          // [elements]
    std::int64_t elements;  // at least 1
    std::int64_t end;       // chunks of this tensor and of those before it
  } tensors[kMaxTensors];
  double* sums;  // [end of the last tensor]
};

// Asynchronous on `stream`.
void launch_chunk_sums(const ChunkSumsParams& params, CUstream_st* stream);

}  // namespace birkhoff
