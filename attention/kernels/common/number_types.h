// Numbers and rows as CPU kernels take them. No LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace birkhoff {

// Most queries or keys of one tile. 64 x 64 products of fp32 with D = 64 keep an operand (16 KiB)
// in L1 and all scratch in L2; blocks of 64 are the usual size.
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
// What numbers T are added up in.
template <typename T>
using Sum = typename SumOf<T>::Type;

// Row r of D contiguous numbers lies at data + r * stride.
template <typename T>
struct Rows {
  T* data = nullptr;
  std::ptrdiff_t stride = 0;
};

}  // namespace birkhoff
