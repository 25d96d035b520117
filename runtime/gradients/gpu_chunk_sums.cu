// Sums of squares in the fixed order of runtime/gradients/fixed_order.h, so that device and host
// get the same bits (legend: k chunk of 4,096 elements, l lane of 16):
//
//   lane[k, l] = sum over j = 0 .. 255 of x[4096 k + 16 j + l]^2           in this order
//   lane[k, 0] += the squares of a last chunk beyond a multiple of 16      in this order
//   chunk[k]   = lane[k, 0] + lane[k, 1] + ... + lane[k, 15]
//
// x: [n] fp32 or bf16, of each of several tensors; sums in fp64. A product of two fp32 is exact in
// fp64, so it does not matter whether the compiler fuses it with the addition.
//
// Half a warp owns a chunk of elements, a thread owns a lane: 8 chunks for 128 threads. One launch
// takes many tensors, because a gradient bucket alone does not fill a GPU. The kernel reads x once.
// No shared memory, no atomics: deterministic on every device.
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"
#include "runtime/gradients/gpu_chunk_sums_params.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 16;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    chunk_sums_kernel(const __grid_constant__ ChunkSumsParams p) {
  const std::int64_t chunk = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  int tensor = 0;
  while (tensor + 1 < p.num_tensors && p.tensors[tensor].end <= chunk) ++tensor;
  const T* const x_n = static_cast<const T*>(p.tensors[tensor].x);
  const std::int64_t elements = p.tensors[tensor].elements;
  const std::int64_t first =
      (chunk - (tensor > 0 ? p.tensors[tensor - 1].end : 0)) * ChunkSumsParams::kChunk;
  // Threads past the end join the exchange below with a sum of 0.
  const std::int64_t left = elements - first;
  const int size = static_cast<int>(left < 0                         ? 0
                                    : left < ChunkSumsParams::kChunk ? left
                                                                     : ChunkSumsParams::kChunk);
  double sum = 0;
  int i = 0;
  // 16 loads are in flight before the first is waited for: enough to keep the memory busy.
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
  if (lane == 0 && size > 0) p.sums[chunk] = total;
}

}  // namespace

void launch_chunk_sums(const ChunkSumsParams& params, cudaStream_t stream) {
  if (params.num_tensors == 0) return;
  constexpr std::int64_t kChunksOfBlock = kThreads / kLanes;
  const std::int64_t num_chunks = params.tensors[params.num_tensors - 1].end;
  const std::int64_t blocks = (num_chunks + kChunksOfBlock - 1) / kChunksOfBlock;
  launch({.blocks = blocks, .threads = kThreads, .stream = stream},
         params.dtype == KernelDtype::kBFloat16 ? chunk_sums_kernel<__nv_bfloat16>
                                                : chunk_sums_kernel<float>,
         params);
}

}  // namespace birkhoff
