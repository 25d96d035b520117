// Reduction over ranks, in the order of the ranks:
//
//   y[i] = x[0, i] op x[1, i] op ... op x[R - 1, i]      op: sum, max, min
//
// x: [R, n] contiguous, y: [n]; fp32, fp64, int64, or bf16, which accumulates in fp32 and is
// rounded once. max and min are NaN where any x[r, i] is NaN.
//
// A thread computes the elements i = its index in the grid plus multiples of the grid's number of
// threads. For each of them it reads one element of every row and writes one. Blocks have 256
// threads and use no shared memory. Deterministic: the rows are added in order, whatever the grid.
#include <algorithm>

#include "cluster/base/collectives/gpu_reduce_params.h"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 256;
// Enough for 2,048 threads on each of 132 multiprocessors, four times over.
constexpr std::int64_t kMaxBlocks = 4224;

__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline std::int64_t widen(std::int64_t x) { return x; }

template <typename T, typename Wide>
__device__ inline T narrow(Wide x) {
  return static_cast<T>(x);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16, float>(float x) {
  return from_float<__nv_bfloat16>(x);
}

template <ReduceOp op, typename T>
__device__ inline T combine(T a, T b) {
  if constexpr (op == ReduceOp::kSum) return a + b;
  // `b != b`: a NaN on either side wins.
  if constexpr (op == ReduceOp::kMax) return b > a || b != b ? b : a;
  if constexpr (op == ReduceOp::kMin) return b < a || b != b ? b : a;
}

template <ReduceOp op, typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const T* x_Rn, T* y_n, int num_inputs, std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    auto accumulator = widen(x_Rn[i]);
#pragma unroll 4
    for (int r = 1; r < num_inputs; ++r) {
      accumulator = combine<op>(accumulator, widen(x_Rn[r * count + i]));
    }
    y_n[i] = narrow<T>(accumulator);
  }
}

template <ReduceOp op, typename T>
void launch_typed(const ReduceParams& p, cudaStream_t stream) {
  const std::int64_t blocks = std::min((p.count + kThreads - 1) / kThreads, kMaxBlocks);
  launch({.blocks = blocks, .threads = kThreads, .stream = stream}, reduce_kernel<op, T>,
         static_cast<const T*>(p.inputs), static_cast<T*>(p.output), p.num_inputs, p.count);
}

template <ReduceOp op>
void launch_op(const ReduceParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case KernelDtype::kFloat:
      return launch_typed<op, float>(p, stream);
    case KernelDtype::kDouble:
      return launch_typed<op, double>(p, stream);
    case KernelDtype::kBFloat16:
      return launch_typed<op, __nv_bfloat16>(p, stream);
    case KernelDtype::kLong:
      return launch_typed<op, std::int64_t>(p, stream);
    case KernelDtype::kHalf:
      break;  // no group supports fp16
  }
  cuda_check(cudaErrorInvalidValue, "launch_reduce");
}

}  // namespace

void launch_reduce(const ReduceParams& params, cudaStream_t stream) {
  switch (params.op) {
    case ReduceOp::kSum:
      return launch_op<ReduceOp::kSum>(params, stream);
    case ReduceOp::kMax:
      return launch_op<ReduceOp::kMax>(params, stream);
    case ReduceOp::kMin:
      return launch_op<ReduceOp::kMin>(params, stream);
  }
}

}  // namespace birkhoff
