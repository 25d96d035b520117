// Rows as GPU kernels read and write them. Compiled by g++ and nvcc: no LibTorch here.
// common/fitting_rows.h makes them from tensors.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// Row r of head h of sample b begins at data + b strides[0] + h strides[1] + r strides[2], in
// elements; its elements are contiguous.
struct RowsParams {
  void* data;  // written only where it is a result
  std::int64_t strides[3];
};

// A head of a sample.
struct GpuHead {
  int b, h;
};

template <typename T>
BIRKHOFF_DEVICE T* row_of(const RowsParams& x, GpuHead head, std::int64_t row) {
  return static_cast<T*>(x.data) + head.b * x.strides[0] + head.h * x.strides[1] +
         row * x.strides[2];
}

}  // namespace birkhoff
