// Arguments of the kernels that sum squares. See runtime/squared_norm.cu.
#pragma once

#include <cstdint>

#include "cluster/base/cuda/dtype.h"

struct CUstream_st;

namespace birkhoff {

struct SquaredNormParams {
  const void* x;  // [elements], fp32 or bf16
  KernelDtype dtype;
  std::int64_t elements;
  double* block_sums;  // [ceil(elements / kBlock)], scratch
  double* total;       // the sum is added to it

  static constexpr std::int64_t kBlock = 4096;  // as in runtime/fixed_order.h
};

// Asynchronous on `stream`.
void launch_squared_norm(const SquaredNormParams& params, CUstream_st* stream);

}  // namespace birkhoff
