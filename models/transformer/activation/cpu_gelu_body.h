// The loops of cpu_gelu.h, for vectors of AVX-512.
//
// Phi(x) - 1/2 and Phi(x) + x phi(x) - 1/2 are odd functions that are 1/2 from 6 on, within 4e-8.
// Between 0 and 6 they are polynomials of degree 5 on 16 segments; one register holds a coefficient
// of all segments. That takes fewer instructions than exp and erf.
#pragma once

#include "attention/kernels/common/cpu_vector.h"
#include "models/transformer/activation/cpu_gelu.h"

namespace birkhoff {
namespace {

constexpr int kSegments = 16, kDegree = 5;
constexpr double kEnd = 6;
static_assert(kLanes<float> == kSegments);

// Coefficient c of segment s, in t = 0 to 1 along the segment, from the highest.
struct Segments {
  float coefficients[kDegree + 1][kSegments];
};

// Interpolates f at Chebyshev nodes (Newton's divided differences).
constexpr Segments interpolate(double (*f)(double)) {
  constexpr int kNodes = kDegree + 1;
  constexpr double kCosines[] = {0.96592582628906829, 0.70710678118654752, 0.25881904510252076};
  Segments segments{};
  for (int s = 0; s < kSegments; ++s) {
    double t[kNodes] = {}, newton[kNodes] = {}, powers[kNodes] = {};
    for (int i = 0; i < kNodes; ++i) {
      t[i] = 0.5 + (i < kNodes / 2 ? -kCosines[i] : kCosines[kNodes - 1 - i]) / 2;
      newton[i] = f((s + t[i]) * kEnd / kSegments);
    }
    for (int order = 1; order < kNodes; ++order) {
      for (int i = kNodes - 1; i >= order; --i) {
        newton[i] = (newton[i] - newton[i - 1]) / (t[i] - t[i - order]);
      }
    }
    for (int i = kNodes - 1; i >= 0; --i) {  // powers = powers (t - t_i) + newton_i
      for (int power = kDegree; power > 0; --power) {
        powers[power] = powers[power - 1] - powers[power] * t[i];
      }
      powers[0] = newton[i] - powers[0] * t[i];
    }
    for (int power = 0; power < kNodes; ++power) {
      segments.coefficients[kDegree - power][s] = static_cast<float>(powers[power]);
    }
  }
  return segments;
}
constexpr double odd_value(double x) { return __builtin_erf(x * 0.70710678118654752) / 2; }
constexpr double odd_slope(double x) {
  return odd_value(x) + x * __builtin_exp(-x * x / 2) * 0.39894228040143268;
}
constexpr Segments kValue = interpolate(odd_value), kSlope = interpolate(odd_slope);

// 1/2 + the odd function. NaN stays NaN.
inline Vector<float> evaluate(const Segments& segments, Vector<float> x) {
  constexpr std::int32_t kSign = INT32_MIN;
  const Bits<float> bits = reinterpret_cast<Bits<float>>(x);
  const auto position = reinterpret_cast<Vector<float>>(bits & ~kSign) * (kSegments / float{kEnd});
  const Bits<float> segment = __builtin_convertvector(position, Bits<float>);
  const Vector<float> t = position - __builtin_convertvector(segment, Vector<float>);
  Vector<float> f{};
  for (const auto& coefficients : segments.coefficients) {
    f = f * t + __builtin_shuffle(load(coefficients), segment);
  }
  f = position >= float{kSegments} ? Vector<float>{} + 0.5f : f;
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Bits<float>>(f) ^ (bits & kSign)) + 0.5f;
}

inline Vector<float> wide(const float* x) { return load(x); }
inline Vector<float> wide(const Bf16* x) {
  using Halves [[gnu::vector_size(kVectorBytes / 2)]] = std::uint16_t;
  using Words [[gnu::vector_size(kVectorBytes)]] = std::uint32_t;
  Halves halves;
  __builtin_memcpy(&halves, x, sizeof(halves));
  return reinterpret_cast<Vector<float>>(__builtin_convertvector(halves, Words) << 16);
}
inline void round_to(float* y, Vector<float> v) { store(y, v); }
inline void round_to(Bf16* y, Vector<float> v) {
  const __m256bh narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  __builtin_memcpy(y, &narrow, sizeof(narrow));
}

// y = f(x..), a vector at a time; the last is padded with zeros.
template <typename T, typename F, typename... X>
inline void for_vectors(std::size_t n, T* y, F f, const X*... x) {
  constexpr std::size_t kN = kLanes<float>;
  std::size_t i = 0;
  for (; i + kN <= n; i += kN) round_to(y + i, f(wide(x + i)...));
  if (i == n) return;
  const std::size_t bytes = (n - i) * sizeof(T);
  const auto padded = [&](const T* from) {
    T row[kN] = {};
    __builtin_memcpy(row, from + i, bytes);
    return wide(row);
  };
  T row[kN];
  round_to(row, f(padded(x)...));
  __builtin_memcpy(y + i, row, bytes);
}

template <typename T>
void gelu_forward(const T* x, std::size_t n, T* y) {
  for_vectors(
      n, y, [](Vector<float> v) { return v * evaluate(kValue, v); }, x);
}

template <typename T>
void gelu_backward(const T* x, const T* d_y, std::size_t n, T* d_x) {
  for_vectors(
      n, d_x, [](Vector<float> v, Vector<float> d) { return d * evaluate(kSlope, v); }, x, d_y);
}

template <typename T>
constexpr GeluKernels<T> kGeluKernels{&gelu_forward<T>, &gelu_backward<T>};

}  // namespace
}  // namespace birkhoff
