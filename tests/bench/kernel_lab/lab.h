// Shared code of the kernel lab's programs: device memory with random contents, timing, checks and
// the table. No LibTorch here: nvcc alone builds a program in seconds (Makefile).
//
// A program measures one family of kernels through the kernels' own launch functions and parameter
// structs. For each case it
//  - fills the outputs with NaN, launches once and compares them with a slow fp32 kernel that is
//    written in the program itself, or in attention.h. The bound is that of the tests
//    (tests/kernel_error.h): twice the error of the same slow kernel with products rounded to 16
//    bits, plus one rounding;
//  - launches again and compares the bits;
//  - records launches on several copies of the tensors as a CUDA graph. The copies together exceed
//    the L2 cache several times, so each launch finds its inputs in memory, not in the cache;
//  - prints one line: kernel, shape, microseconds, bytes, share of the copy speed of the same run,
//    TFLOP/s, the time that counting predicts, and the two checks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/gpu/check.h"

namespace birkhoff::lab {

// f(i) for i in [0, count), one thread each, on the default stream.
template <typename Function>
__global__ void for_each_kernel(std::int64_t count, Function f) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    f(i);
  }
}
template <typename Function>
void for_each(std::int64_t count, Function f) {
  if (count == 0) return;
  const std::int64_t blocks = (count + 255) / 256;
  for_each_kernel<<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), 256>>>(count, f);
  cuda_check(cudaGetLastError(), "for_each");
}

__host__ __device__ inline std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// About normal: the sum of four uniforms.
__host__ __device__ inline float random_value(std::uint64_t seed, std::int64_t i) {
  const std::uint64_t bits = mixed(seed * 0x100000001b3u + static_cast<std::uint64_t>(i));
  float sum = 0;
  for (int part = 0; part < 4; ++part) sum += static_cast<float>(bits >> 16 * part & 0xffff);
  return (sum / 65536 - 2) * 1.7f;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16(x);
  }
}
// With kRounded, x as a factor of a 16-bit product has it.
template <bool kRounded>
__device__ float rounded(float x) {
  return kRounded ? __bfloat162float(__float2bfloat16(x)) : x;
}
__device__ inline double dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int size) {
  double sum = 0;
  for (int i = 0; i < size; ++i) sum += static_cast<double>(to_float(a[i])) * to_float(b[i]);
  return sum;
}

// Device memory of `size` elements; it is freed with the last copy.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(std::int64_t size) : size_(size) {
    void* memory = nullptr;
    cuda_check(cudaMalloc(&memory, static_cast<std::size_t>(size) * sizeof(T) + 16), "cudaMalloc");
    memory_ = std::shared_ptr<T>(static_cast<T*>(memory), [](T* each) { cudaFree(each); });
  }

  T* get() const { return memory_.get(); }
  std::uint16_t* words() const { return reinterpret_cast<std::uint16_t*>(memory_.get()); }
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return size_ * static_cast<std::int64_t>(sizeof(T)); }

  const Array& fill_random(std::uint64_t seed, float scale = 1) const {
    T* to = get();
    for_each(size_, [=] __device__(std::int64_t i) {
      to[i] = from_float<T>(scale * random_value(seed, i));
    });
    return *this;
  }
  // All bits set: NaN in fp32 and bf16.
  void poison() const {
    cuda_check(cudaMemset(get(), 0xff, static_cast<std::size_t>(bytes())), "cudaMemset");
  }
  void zero() const {
    cuda_check(cudaMemset(get(), 0, static_cast<std::size_t>(bytes())), "cudaMemset");
  }

 private:
  std::int64_t size_ = 0;
  std::shared_ptr<T> memory_;
};
using Half = Array<__nv_bfloat16>;
using Float = Array<float>;

// The largest |x - exact| and the largest |exact|. A NaN in x counts as infinite.
struct Distance {
  float error = 0, largest = 0;
};
template <typename T, typename Exact>
Distance distance(const Array<T>& x, const Array<Exact>& exact) {
  Array<unsigned> result(2);
  cuda_check(cudaMemset(result.get(), 0, 8), "cudaMemset");
  const T* a = x.get();
  const Exact* b = exact.get();
  unsigned* to = result.get();
  for_each(exact.size(), [=] __device__(std::int64_t i) {
    const float error = fabsf(to_float(a[i]) - to_float(b[i]));
    atomicMax(to, __float_as_uint(error == error ? error : INFINITY));  // order of floats >= 0
    atomicMax(to + 1, __float_as_uint(fabsf(to_float(b[i]))));
  });
  Distance host;
  cuda_check(cudaMemcpy(&host, result.get(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

// Depends on all bits of `x` and their positions.
template <typename T>
std::uint64_t checksum(const Array<T>& x) {
  Array<unsigned long long> result(1);
  cuda_check(cudaMemset(result.get(), 0, 8), "cudaMemset");
  const auto* words = reinterpret_cast<const unsigned char*>(x.get());
  unsigned long long* to = result.get();
  const int size = sizeof(T);
  for_each(x.size(), [=] __device__(std::int64_t i) {
    std::uint64_t bits = 0;
    for (int byte = 0; byte < size; ++byte) bits = bits << 8 | words[i * size + byte];
    atomicAdd(to, static_cast<unsigned long long>(mixed(bits ^ mixed(i))));
  });
  unsigned long long host = 0;
  cuda_check(cudaMemcpy(&host, result.get(), 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

// One output of a kernel, with what the slow kernel gives for it.
struct Output {
  std::string name;
  std::function<void()> poison;
  std::function<std::uint64_t()> checksum;
  std::function<Distance()> kernel, rounded;  // distances to the exact values
  float epsilon;                              // one rounding
};
template <typename T, typename Exact, typename Rounded>
Output output(const std::string& name, const Array<T>& x, const Array<Exact>& exact,
              const Array<Rounded>& rounded) {
  return {name,
          [=] { x.poison(); },
          [=] { return checksum(x); },
          [=] { return distance(x, exact); },
          [=] { return distance(rounded, exact); },
          sizeof(T) == 2 ? 0x1p-8f : 0x1p-22f};
}

struct Case {
  std::string kernel, shape;
  double bytes = 0, flops = 0;  // of a launch: what it has to load and store, and to multiply
  std::int64_t copy_bytes = 0;  // of the tensors of one copy
  std::function<void(int, cudaStream_t)> launch;  // on copy i
  std::vector<Output> outputs;                    // of copy 0; empty: not checked
};

class Lab {
 public:
  Lab(int argc, char** argv);

  // Whether the command line asks for a case.
  bool wants(const std::string& kernel, const std::string& shape) const;
  // How many copies of `bytes` exceed the L2 cache several times.
  int copies(std::int64_t bytes) const;
  // Checks and times a case, and prints its line.
  void run(const Case& each);
  // 0, or 1 if a check failed.
  int exit_code() const { return failed_; }

 private:
  double microseconds(const Case& each, int copies) const;
  std::string check(const Case& each) const;

  std::vector<std::string> filters_;
  bool once_ = false;  // a single launch of each case, for profilers: no timing
  std::string card_;
  std::int64_t l2_bytes_ = 0;
  double copy_speed_ = 0;  // bytes read and written, per second
  int failed_ = 0;
};

// Each program defines its cases.
void cases(Lab& lab);

}  // namespace birkhoff::lab
