// Vectors of the width that the including file is compiled for, and the operations of the tile
// kernels on them. Included by files that are compiled with different flags from the rest: nothing
// here has external linkage, and nothing is used from the standard library that the compiler could
// emit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "attention/kernels/common/number_types.h"

namespace birkhoff {
namespace {

// Two bf16 that are neighbors in a sum of products; the first is in the low half.
using Bf16Pair = std::int32_t;

// The type that products of T multiply.
template <typename T>
struct OperandOf {
  using Type = Sum<T>;
};
#if defined(__AVX512BF16__)
template <>
struct OperandOf<Bf16> {
  using Type = Bf16Pair;
};
#endif
template <typename T>
using Operand = typename OperandOf<T>::Type;
// Elements per operand.
template <typename E>
constexpr int kNumbers = 1;
template <>
constexpr int kNumbers<Bf16Pair> = 2;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct VectorTypes;
template <>
struct VectorTypes<float> {
  using Vector [[gnu::vector_size(kVectorBytes)]] = float;
  using Bits [[gnu::vector_size(kVectorBytes)]] = std::int32_t;
};
template <>
struct VectorTypes<double> {
  using Vector [[gnu::vector_size(kVectorBytes)]] = double;
  using Bits [[gnu::vector_size(kVectorBytes)]] = std::int64_t;
};
template <>
struct VectorTypes<Bf16Pair> {
  using Vector = VectorTypes<float>::Bits;
};
template <typename T>
using Vector = typename VectorTypes<T>::Vector;
template <typename T>
using Bits = typename VectorTypes<T>::Bits;
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
inline Vector<T> load(const T* x) {
  Vector<T> v;
  __builtin_memcpy(&v, x, sizeof(v));
  return v;
}
template <typename T>
inline void store(T* x, Vector<T> v) {
  __builtin_memcpy(x, &v, sizeof(v));
}

// Returns v, held in a register. With AVX-512 the compiler would otherwise read it from memory
// again at each use, and products that use it only a few times would wait for these loads.
template <typename V>
inline V in_register(V v) {
#if defined(__x86_64__) && !defined(BIRKHOFF_EMULATED_VECTORS)
  asm("" : "+v"(v));
#endif
  return v;
}

inline float to_sum(float x) { return x; }
inline double to_sum(double x) { return x; }
inline float to_sum(Bf16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x) << 16);
}

template <typename T>
inline bool is_nan(T x) {
  const auto number = to_sum(x);
  return number != number;
}

// Rounded to nearest, ties to even.
template <typename T>
inline T from_sum(Sum<T> x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<Bf16>((x != x ? bits | 0x400000 : rounded) >> 16);
  } else {
    return x;
  }
}

// The dot product of n elements, in parts, which the compiler adds in parallel.
template <typename A, typename B>
Sum<A> dot_product(const A* a, const B* b, std::int64_t n) {
  constexpr std::int64_t kParts = 16;
  Sum<A> parts[kParts] = {};
  std::int64_t i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (std::int64_t p = 0; p < kParts; ++p) parts[p] += to_sum(a[i + p]) * to_sum(b[i + p]);
  }
  Sum<A> product = 0;
  for (const Sum<A> part : parts) product += part;
  for (; i < n; ++i) product += to_sum(a[i]) * to_sum(b[i]);
  return product;
}

// sum += a b in each lane.
template <typename T>
inline void multiply_add(Vector<T> b, T a, Vector<T>& sum) {
  sum += b * a;
}
#if defined(__AVX512BF16__)
inline void multiply_add(Vector<Bf16Pair> b, Bf16Pair a, Vector<float>& sum) {
  sum = reinterpret_cast<Vector<float>>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(b),
                       reinterpret_cast<__m512bh>(Vector<Bf16Pair>{} + a)));
}
#endif

// Integers as wide as a lane.
template <typename T>
using Bit = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
template <typename T>
constexpr int kBits = 8 * static_cast<int>(sizeof(T));
template <typename T>
inline Bits<T> load_bits(const Bit<T>* x) {
  Bits<T> v;
  __builtin_memcpy(&v, x, sizeof(v));
  return v;
}

// exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 q(r),
// where q is interpolated at Chebyshev nodes. ln 2 is split in two so that n ln 2 loses no digits.
template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kInverseLn2 = 1.4426950216293335f;
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.428606765330187e-06f;
  static constexpr float kRound = 0x1.8p23f;  // x + kRound - kRound rounds x to an integer
  static constexpr int kBias = 127;           // of the exponent
  static constexpr float kMin = -87.3f;       // below it, exp(x) is not a normal number
  static constexpr int kMantissaBits = 23;
  // Relative error of the polynomial: 1.1e-8.
  static constexpr float kQ[] = {0.0013926250394433737f, 0.00836323294788599f, 0.04166655242443085f,
                                 0.16666576266288757f, 0.5f};
};
template <>
struct ExpConstants<double> {
  static constexpr double kInverseLn2 = 1.4426950408889634;
  static constexpr double kLn2High = 0.6931471805582987, kLn2Low = 1.6465949582897082e-12;
  static constexpr double kRound = 0x1.8p52;
  static constexpr int kBias = 1023;
  static constexpr double kMin = -708.3;
  static constexpr int kMantissaBits = 52;
  // Relative error of the polynomial: 1.7e-17.
  static constexpr double kQ[] = {2.5100472505694996e-08, 2.7620201591031547e-07,
                                  2.7557268276905696e-06, 2.4801521057868204e-05,
                                  0.00019841269863171557, 0.0013888888917367081,
                                  0.008333333333330039,   0.041666666666623824,
                                  0.16666666666666669,    0.5000000000000001};
};

// Whether a product is fused with the addition after it. In exp() that addition then meets no tie,
// so the parity of the added constant does not matter.
#if defined(__FMA__)
constexpr bool kIsFused = true;
#else
constexpr bool kIsFused = false;
#endif

template <typename T>
inline Vector<T> exp(Vector<T> x) {
  using C = ExpConstants<T>;
  constexpr T kRound = C::kRound + (kIsFused ? C::kBias : 0);
  const Vector<T> shifted = x * C::kInverseLn2 + kRound;
  const Vector<T> n = shifted - kRound;
  const Vector<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  Vector<T> q = Vector<T>{} + C::kQ[0];
  for (std::size_t i = 1; i < sizeof(C::kQ) / sizeof(T); ++i) q = q * r + C::kQ[i];
  const Vector<T> y = q * (r * r) + r + T{1};
  // The low bits of `shifted` are n, plus the bias if it was added. With the bias, shifted up, they
  // are the bits of 2^n. Unsigned, because they can be anything where x is below kMin. NaN stays
  // NaN in the product.
  using Word = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  using Words [[gnu::vector_size(kVectorBytes)]] = Word;
  constexpr Word kBiasMissing = kIsFused ? 0 : C::kBias;
  const Words power = (reinterpret_cast<Words>(shifted) + kBiasMissing) << C::kMantissaBits;
  return x < C::kMin ? Vector<T>{} : y * reinterpret_cast<Vector<T>>(power);
}

template <int kDistance, typename V, std::size_t... kLane>
inline void exchange(V& a, V& b, std::index_sequence<kLane...>) {
  constexpr std::size_t kCount = sizeof...(kLane);
  const V low =
      __builtin_shufflevector(a, b, (kLane & kDistance ? kCount + kLane - kDistance : kLane)...);
  const V high =
      __builtin_shufflevector(a, b, (kLane & kDistance ? kCount + kLane : kLane + kDistance)...);
  a = low;
  b = high;
}
// a, b = the lanes a0 b0 a1 b1 .., in this order.
template <typename V, std::size_t... kLane>
inline void interleave(V& a, V& b, std::index_sequence<kLane...>) {
  constexpr std::size_t kCount = sizeof...(kLane);
  const V low = __builtin_shufflevector(a, b, (kLane / 2 + (kLane % 2) * kCount)...);
  const V high = __builtin_shufflevector(a, b, (kCount / 2 + kLane / 2 + (kLane % 2) * kCount)...);
  a = low;
  b = high;
}
template <typename T>
inline void interleave(Vector<T>& a, Vector<T>& b) {
  interleave(a, b, std::make_index_sequence<kLanes<T>>());
}

// Swaps x[r] lane c and x[c] lane r, by exchanging lanes at doubling distances.
template <typename T, int kDistance = 1>
inline void transpose(Vector<T> (&x)[kLanes<T>]) {
  if constexpr (kDistance < kLanes<T>) {
    for (int i = 0; i < kLanes<T>; ++i) {
      if (i & kDistance) continue;
      exchange<kDistance>(x[i], x[i + kDistance], std::make_index_sequence<kLanes<T>>());
    }
    transpose<T, 2 * kDistance>(x);
  }
}

}  // namespace
}  // namespace birkhoff
