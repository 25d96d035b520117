// The GPU kernels of attention over gathered rows, run on the CPU by tests/emulated_cuda. Their
// part for tensor cores runs on another emulation (tests/cluster/base/emulated_gpu.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/kernels/counting_sort/gpu_sort.h"
#include "attention/kernels/gathered_attention/gpu_params.h"

namespace birkhoff::test {

struct GatheredProblem;

// launch_gathered_tiles() and launch_gathered_tiles_backward(), emulated.
struct EmulatedTiles {
  void (*forward)(const GatheredParams&);
  void (*backward)(const GatheredParams&);
};

void emulate_number_groups(const CountingSortParams& params);
// `tiles` is only used with GatheredParams::tensor_cores.
void emulate_gathered_slots(const GatheredParams& params, const EmulatedTiles* tiles);
void emulate_gathered_merge(const GatheredParams& params);
void emulate_gathered_attention_backward(const GatheredParams& params, const EmulatedTiles* tiles);
void emulate_sums_of_slots(const GatheredParams& params, const RowsParams& numbers, int columns,
                           const RowsParams& sums);

// Results as solve() returns them (gathered_problem.h). Memory that the kernels must write holds
// NaN before. With `tiles` the problem must be one for tensor cores; without, they are not used.
std::vector<at::Tensor> solve_emulated(const GatheredProblem& problem,
                                       const EmulatedTiles* tiles = nullptr);

}  // namespace birkhoff::test
