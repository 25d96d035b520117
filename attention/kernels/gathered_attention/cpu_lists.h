// Where the lists and tensors of attention over gathered rows lie, for the CPU code. Legend: B
// batch, H heads, L rows, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

constexpr std::int64_t kWorthAThread = 1'000'000;  // multiplications

struct Head {
  std::int64_t b, h;
};

// The lists of one head.
struct HeadLists {
  const std::int32_t *rows, *ends, *order, *starts;

  HeadLists(const RowLists& lists, Head head) {
    const at::Tensor& rows_BHP = lists.rows_BHP;
    const std::int64_t number = (rows_BHP.size(0) == 1 ? 0 : head.b) * rows_BHP.size(1) +
                                (rows_BHP.size(1) == 1 ? 0 : head.h);
    const auto of_head = [&](const at::Tensor& x) {
      return x.const_data_ptr<std::int32_t>() + number * x.size(2);
    };
    rows = of_head(rows_BHP);
    ends = of_head(lists.ends_BHG);
    order = of_head(lists.order_BHP);
    starts = of_head(lists.starts_BHR);
  }
};

// Row `row` of x [B, H, rows, D], whose numbers are contiguous.
template <typename T>
const T* row_of(const at::Tensor& x, Head head, std::int64_t row) {
  return static_cast<const T*>(x.const_data_ptr()) + head.b * x.stride(0) + head.h * x.stride(1) +
         row * x.stride(2);
}
template <typename T>
T* mutable_row_of(const at::Tensor& x, Head head, std::int64_t row) {
  return static_cast<T*>(x.mutable_data_ptr()) + head.b * x.stride(0) + head.h * x.stride(1) +
         row * x.stride(2);
}
// Number `row` of x [B, H, rows], which is contiguous.
template <typename S>
S* number_of(const at::Tensor& x, Head head, std::int64_t row) {
  return x.mutable_data_ptr<S>() + (head.b * x.size(1) + head.h) * x.size(2) + row;
}

}  // namespace birkhoff
