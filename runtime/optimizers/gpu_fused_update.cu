// One update of a flat bucket in one pass: a rule of update_rules.h applied to each element, with
// weight decay where d[i / 64] is not 0.
//
// p and the rule's states fp32 [n]; g fp32 or bf16 [n]; d u8 [n / 64]; lr, s, apply, t fp64 scalars
// in device memory, so that a captured step replays with new values. With apply = 0 nothing is
// written: the bits stay the same whatever g holds.
//
// Blocks of 256 threads; a thread owns 4 adjacent elements at a time, at multiples of 4 times the
// grid's threads. Memory of an element with S states: 8 + 4 S bytes read (6 + 4 S with bf16
// gradients) and 4 + 4 S written. Shared memory: the rule's factors, computed in fp64 by one thread
// of each block. Deterministic: an element depends only on itself and the scalars.
#include <algorithm>
#include <utility>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "runtime/optimizers/gpu_fused_update_params.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // 16 bytes of fp32: one instruction
// Each block first waits for two powers in fp64, about a microsecond: a few blocks for each of 132
// multiprocessors fill the GPU and wait for them once.
constexpr std::int64_t kMaxBlocks = 1056;

extern __shared__ float4 update_memory[];  // float4 for its alignment

// The rule applied to element k of each vector.
template <typename Rule, typename Gradient, std::size_t... kStates>
__device__ inline void update_element(const typename Rule::template Factors<float>& factors,
                                      bool decays, int k, Vector<float, kPerThread>& values,
                                      const Vector<Gradient, kPerThread>& gradients,
                                      Vector<float, kPerThread>* states,
                                      std::index_sequence<kStates...>) {
  Rule::update(factors, decays, values.elements[k], to_float(gradients.elements[k]),
               states[kStates].elements[k]...);
}

template <typename Rule, typename Gradient>
__global__ void __launch_bounds__(kThreads) fused_update_kernel(const FusedUpdateParams<Rule> p) {
  if (*p.apply == 0) return;
  using Factors = typename Rule::template Factors<float>;
  auto& shared = *reinterpret_cast<Factors*>(update_memory);
  if (threadIdx.x == 0) {
    shared = p.rule.template factors<float>({*p.learning_rate, *p.gradient_scale, *p.num_updates});
  }
  __syncthreads();
  const Factors factors = shared;
  const auto* gradients = static_cast<const Gradient*>(p.gradients);
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * kPerThread;
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
  for (std::int64_t i = first; i < p.elements; i += stride) {
    const auto g = load_vector<Gradient, kPerThread>(gradients + i);
    auto values = load_vector<float, kPerThread>(p.values + i);
    Vector<float, kPerThread> states[Rule::kNumStates];
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) {
      states[s] = load_vector<float, kPerThread>(p.states[s] + i);
    }
    const bool decays = p.decayed[i / kDecayGroup] != 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      update_element<Rule>(factors, decays, k, values, g, states,
                           std::make_index_sequence<Rule::kNumStates>());
    }
    store_vector(p.values + i, values);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) store_vector(p.states[s] + i, states[s]);
  }
}

template <typename Rule>
void launch_rule(const FusedUpdateParams<Rule>& params, cudaStream_t stream) {
  constexpr std::int64_t kPerBlock = kThreads * kPerThread;
  const std::int64_t blocks = std::min((params.elements + kPerBlock - 1) / kPerBlock, kMaxBlocks);
  launch({.blocks = blocks,
          .threads = kThreads,
          .stream = stream,
          .shared_bytes = sizeof(typename Rule::template Factors<float>)},
         params.gradient_dtype == KernelDtype::kBFloat16 ? fused_update_kernel<Rule, __nv_bfloat16>
                                                         : fused_update_kernel<Rule, float>,
         params);
}

}  // namespace

void launch_fused_update(const FusedUpdateParams<AdamWRule>& params, cudaStream_t stream) {
  launch_rule(params, stream);
}

void launch_fused_update(const FusedUpdateParams<SgdRule>& params, cudaStream_t stream) {
  launch_rule(params, stream);
}

}  // namespace birkhoff
