// One AdamW update of a flat bucket in one pass: adamw_formula.h applied to each element, with
// weight decay where d[i / 64] is not 0.
//
// p, m, v fp32 [n]; g fp32 or bf16 [n]; d u8 [n / 64]; lr, s, apply, t fp64 scalars in device
// memory, so that a captured step replays with new values. With apply = 0 nothing is written: the
// bits stay the same whatever g holds.
//
// Blocks of 256 threads; a thread owns 4 adjacent elements at a time, at multiples of 4 times the
// grid's threads. Memory: 16 bytes read (12 + 2 with bf16 gradients) and 12 written per element.
// Shared memory: 24 bytes of factors, computed in fp64 by one thread of each block. Deterministic:
// an element depends only on itself and the scalars.
#include <algorithm>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "runtime/optimizers/adamw_formula.h"
#include "runtime/optimizers/gpu_adamw_params.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // 16 bytes of fp32: one instruction
// Each block first waits for two powers in fp64, about a microsecond: a few blocks for each of 132
// multiprocessors fill the GPU and wait for them once.
constexpr std::int64_t kMaxBlocks = 1056;

template <typename Gradient>
__global__ void __launch_bounds__(kThreads) fused_adamw_kernel(const FusedAdamWParams p) {
  if (*p.apply == 0) return;
  __shared__ AdamWFactors<float> shared;
  if (threadIdx.x == 0) {
    shared = adamw_factors<float>(*p.gradient_scale, p.beta1, p.beta2, p.epsilon, *p.learning_rate,
                                  *p.num_updates);
  }
  __syncthreads();
  const AdamWFactors<float> factors = shared;
  const auto decay = static_cast<float>(1 - *p.learning_rate * p.weight_decay);
  const auto* gradients = static_cast<const Gradient*>(p.gradients);
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * kPerThread;
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
  for (std::int64_t i = first; i < p.elements; i += stride) {
    const auto g = load_vector<Gradient, kPerThread>(gradients + i);
    auto values = load_vector<float, kPerThread>(p.values + i);
    auto m = load_vector<float, kPerThread>(p.m + i);
    auto v = load_vector<float, kPerThread>(p.v + i);
    const float keep = p.decayed[i / FusedAdamWParams::kGroup] != 0 ? decay : 1.0f;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      adamw_update(values.elements[k], to_float(g.elements[k]), m.elements[k], v.elements[k], keep,
                   factors);
    }
    store_vector(p.values + i, values);
    store_vector(p.m + i, m);
    store_vector(p.v + i, v);
  }
}

}  // namespace

void launch_fused_adamw(const FusedAdamWParams& params, cudaStream_t stream) {
  constexpr std::int64_t kPerBlock = kThreads * kPerThread;
  const std::int64_t blocks = std::min((params.elements + kPerBlock - 1) / kPerBlock, kMaxBlocks);
  launch({.blocks = blocks, .threads = kThreads, .stream = stream},
         params.gradient_dtype == KernelDtype::kBFloat16 ? fused_adamw_kernel<__nv_bfloat16>
                                                         : fused_adamw_kernel<float>,
         params);
}

}  // namespace birkhoff
