// AVX-512's products of bf16 for any processor: with this folder in front of the compiler's headers
// and __AVX512F__ and __AVX512BF16__ defined, tests compile the sources of our AVX-512 kernels.
// Vectors of 64 bytes are the compiler's own.
#pragma once

#include <cstdint>
#include <cstring>

using __m512 [[gnu::vector_size(64)]] = float;
using __m512bh [[gnu::vector_size(64)]] = std::int16_t;
using __m256bh [[gnu::vector_size(32)]] = std::int16_t;

inline float emulated_float_of(std::int16_t bf16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::uint16_t>(bf16)) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
// Rounded to nearest, ties to even; NaN stays NaN.
inline std::int16_t emulated_bf16_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const std::uint32_t rounded = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<std::int16_t>(rounded >> 16);
}

// sum + the product of each pair.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  for (int i = 0; i < 16; ++i) {
    sum[i] += emulated_float_of(a[2 * i + 1]) * emulated_float_of(b[2 * i + 1]);
    sum[i] += emulated_float_of(a[2 * i]) * emulated_float_of(b[2 * i]);
  }
  return sum;
}

// `low`, then `high`.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  __m512bh result;
  for (int i = 0; i < 16; ++i) {
    result[i] = emulated_bf16_of(low[i]);
    result[16 + i] = emulated_bf16_of(high[i]);
  }
  return result;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
  __m256bh result;
  for (int i = 0; i < 16; ++i) result[i] = emulated_bf16_of(x[i]);
  return result;
}
