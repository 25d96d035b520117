// Rows as GPU kernels read and write them. Compiled by g++ and nvcc: no LibTorch here.
// common/fitting_rows.h makes them from tensors.
#pragma once

#include <cstdint>

namespace birkhoff {

// Row r of head h of sample b begins at data + b strides[0] + h strides[1] + r strides[2], in
// elements; its elements are contiguous.
struct RowsParams {
  void* data;  // written only where it is a result
  std::int64_t strides[3];
};

}  // namespace birkhoff
