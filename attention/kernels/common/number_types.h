// Number types and rows of the CPU kernels. No LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace birkhoff {

// Maximum queries or keys per tile. In 64 x 64 products of fp32 with D = 64, an operand (16 KiB)
// stays in L1 and all scratch in L2. 64 is the usual block size.
constexpr int kTile = 64;

// A bfloat16: the upper half of a float's bits.
enum class Bf16 : std::uint16_t {};

template <typename T>
struct SumOf {
  using Type = T;
};
template <>
struct SumOf<Bf16> {
  using Type = float;
};
// The type in which values of type T are summed.
template <typename T>
using Sum = typename SumOf<T>::Type;

// Row r of D contiguous elements lies at data + r * stride.
template <typename T>
struct Rows {
  T* data = nullptr;
  std::ptrdiff_t stride = 0;
};

}  // namespace birkhoff
