// Access to the lists and tensors of attention over gathered rows, for the CPU code. Legend: B
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

// The entries of one head in x [B or 1, H or 1, entries], int32 and contiguous.
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

// Row `row` of x [B, H, rows, D], whose elements are contiguous.
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
// One value per slot or row, [B, H, count], contiguous, as a pointer: asking a tensor for it costs
// more than the work of a row. Without data for an undefined tensor.
template <typename S>
struct Numbers {
  S* data = nullptr;
  std::int64_t heads = 0, count = 0;

  Numbers() = default;
  explicit Numbers(const at::Tensor& x)
      : data(x.defined() ? x.mutable_data_ptr<S>() : nullptr),
        heads(x.defined() ? x.size(1) : 0),
        count(x.defined() ? x.size(2) : 0) {}
  S& at(Head head, std::int64_t i) const { return data[(head.b * heads + head.h) * count + i]; }
};

// Rows of D elements, [B, H, count, D].
template <typename T>
struct RowPointers {
  T* data;
  std::int64_t sample_stride, head_stride, row_stride;

  explicit RowPointers(const at::Tensor& x)
      : data(static_cast<T*>(const_cast<void*>(x.const_data_ptr()))),
        sample_stride(x.stride(0)),
        head_stride(x.stride(1)),
        row_stride(x.stride(2)) {}
  T* at(Head head, std::int64_t i) const {
    return data + head.b * sample_stride + head.h * head_stride + i * row_stride;
  }
};

}  // namespace birkhoff
