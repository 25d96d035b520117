// Sum of squares along the fixed tree of runtime/fixed_order.h, so that device and host come to the
// same bits (legend: k block of 4,096 elements, l lane of 16):
//
//   lane[k, l] = sum over j = 0 .. 255 of x[4096 k + 16 j + l]^2         in this order
//   lane[k, 0] += what a last block has beyond a multiple of 16           in this order
//   block[k]   = lane[k, 0] + lane[k, 1] + ... + lane[k, 15]
//   total     += block[0] + block[1] + ...
//
// x: [n] fp32 or bf16; sums in fp64. A product of two fp32 is exact in fp64, so it does not matter
// whether the compiler fuses it with the addition.
//
// First kernel: half a warp owns a block of elements, a thread a lane; 8 blocks for 128 threads. It
// reads x once. Second kernel: one warp adds the blocks' sums; it loads 32 at once and adds them
// one after another. No shared memory, no atomics: deterministic on every device.
#include "cluster/base/cuda/elements.cuh"
#include "cluster/base/cuda/launch.h"
#include "runtime/squared_norm_params.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 16;
constexpr unsigned kWholeWarp = 0xffffffff;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    block_sums_kernel(const T* x_n, std::int64_t elements, double* block_sums) {
  const std::int64_t block = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first = block * SquaredNormParams::kBlock;
  // Threads past the end take part in the exchange below with a sum of nothing.
  const std::int64_t left = elements - first;
  const int size = static_cast<int>(left < 0                           ? 0
                                    : left < SquaredNormParams::kBlock ? left
                                                                       : SquaredNormParams::kBlock);
  double sum = 0;
  int i = 0;
  // 16 loads are under way before the first is waited for: enough to keep the memory busy.
#pragma unroll 16
  for (; i + kLanes <= size; i += kLanes) {
    const double value = to_float(x_n[first + i + lane]);
    sum += value * value;
  }
  if (lane == 0) {
    for (; i < size; ++i) {
      const double value = to_float(x_n[first + i]);
      sum += value * value;
    }
  }
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += __shfl_sync(kWholeWarp, sum, l, kLanes);
  if (lane == 0 && size > 0) block_sums[block] = total;
}

__global__ void __launch_bounds__(32)
    total_kernel(const double* block_sums, std::int64_t num_blocks, double* total) {
  double sum = 0;
  for (std::int64_t first = 0; first < num_blocks; first += 32) {
    const std::int64_t mine = first + threadIdx.x;
    const double value = mine < num_blocks ? block_sums[mine] : 0;
    // Adding 0 behind the end changes no sum of squares.
#pragma unroll
    for (int k = 0; k < 32; ++k) sum += __shfl_sync(kWholeWarp, value, k);
  }
  if (threadIdx.x == 0) *total += sum;
}

template <typename T>
void launch_typed(const SquaredNormParams& p, std::int64_t num_blocks, cudaStream_t stream) {
  constexpr std::int64_t kBlocksOfLaunch = kThreads / kLanes;
  const auto grid = static_cast<unsigned>((num_blocks + kBlocksOfLaunch - 1) / kBlocksOfLaunch);
  launch({.grid = dim3(grid), .block = dim3(kThreads), .stream = stream}, block_sums_kernel<T>,
         static_cast<const T*>(p.x), p.elements, p.block_sums);
}

}  // namespace

void launch_squared_norm(const SquaredNormParams& params, cudaStream_t stream) {
  if (params.elements == 0) return;
  const std::int64_t num_blocks =
      (params.elements + SquaredNormParams::kBlock - 1) / SquaredNormParams::kBlock;
  if (params.dtype == KernelDtype::kBFloat16) {
    launch_typed<__nv_bfloat16>(params, num_blocks, stream);
  } else {
    launch_typed<float>(params, num_blocks, stream);
  }
  launch({.grid = dim3(1), .block = dim3(32), .stream = stream}, total_kernel, params.block_sums,
         num_blocks, params.total);
}

}  // namespace birkhoff
