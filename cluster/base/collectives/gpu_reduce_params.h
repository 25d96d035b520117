// Arguments of the kernel that reduces the data received from ranks. See
// cluster/base/collectives/gpu_reduce.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct ReduceParams {
  ReduceOp op;
  KernelDtype dtype;   // fp32, fp64, bf16 or int64
  const void* inputs;  // [num_inputs, count], row after row
  void* output;        // [count]; may be one of the rows
  int num_inputs;
  std::int64_t count;
};

// output[i] = op over r of inputs[r, i], in the order r = 0, 1, 2, ...: the same bits as
// reduce_in_order (cluster/base/collectives/reduce.h), except for the payload of a NaN.
// Asynchronous on `stream`.
void launch_reduce(const ReduceParams& params, CUstream_st* stream);

}  // namespace birkhoff
