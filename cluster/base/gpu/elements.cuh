// Tensor elements inside kernels: conversions to and from fp32, and vectors of elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace birkhoff {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

// Rounded to nearest, ties to even.
template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// kCount adjacent elements, moved by one instruction: sizeof(T) * kCount is 16, 8, 4 or 2 bytes,
// and the address must be a multiple of it.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T elements[kCount];
};

template <typename T, int kCount>
__device__ inline Vector<T, kCount> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

template <typename T, int kCount>
__device__ inline void store_vector(T* to, const Vector<T, kCount>& vector) {
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

}  // namespace birkhoff
