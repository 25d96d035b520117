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

// The numbers of one head in x [B or 1, H or 1, numbers], int32 and contiguous.
inline const std::int32_t* numbers_of(const at::Tensor& x, Head head) {
  const std::int64_t number =
      (x.size(0) == 1 ? 0 : head.b) * x.size(1) + (x.size(1) == 1 ? 0 : head.h);
  return x.const_data_ptr<std::int32_t>() + number * x.size(2);
}

// The key head of one of `query_heads`, for lists of key heads.
inline Head key_head(Head head, std::int64_t query_heads, std::int64_t key_heads) {
  return {head.b, head.h / (query_heads / key_heads)};
}

// The lists of one key head.
struct HeadLists {
  const std::int32_t *rows, *ends, *order, *starts;

  HeadLists(const RowLists& lists, Head head)
      : rows(numbers_of(lists.rows_BHP, head)),
        ends(numbers_of(lists.ends_BHG, head)),
        order(numbers_of(lists.order_BHP, head)),
        starts(numbers_of(lists.starts_BHR, head)) {}
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
