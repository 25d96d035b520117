// Tensor elements inside kernels: conversions to and from fp32, and vectors of elements; and the
// choice of a kernel by their type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cluster/base/gpu/kernel_types.h"
#include "cluster/base/gpu/launch.h"

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

// Calls f<T>() with the type of bf16 or fp16 elements.
template <typename Function>
void with_16_bit_type(KernelDtype dtype, Function f) {
  if (dtype == KernelDtype::kHalf) return f.template operator()<__half>();
  f.template operator()<__nv_bfloat16>();
}

// Calls f<T>() with the type of fp32, bf16 or fp16 elements.
template <typename Function>
void with_element_type(KernelDtype dtype, Function f) {
  switch (dtype) {
    case KernelDtype::kFloat:
      return f.template operator()<float>();
    case KernelDtype::kBFloat16:
    case KernelDtype::kHalf:
      return with_16_bit_type(dtype, f);
    case KernelDtype::kDouble:
    case KernelDtype::kLong:
      break;  // callers use the reference
  }
  cuda_check(cudaErrorInvalidValue, "choice of a kernel by element type");
}

}  // namespace birkhoff
