// The balance of all prefixes of one matrix together (sinkhorn.h, prefix_balance). The scalings of
// eight prefixes u are the rows of small matrices, so a column step is A E and a row step is B E^T:
// products of the size for which register blocks are made. Works on raw pointers, without LibTorch;
// cpu_sinkhorn.cpp calls it. Legend: E = exp(S - shift), u prefix, r destination of 0..u, c source
// of 0..u-1.
//
//   b_uc = 1 / sum_r a_ur E_rc,   a_ur = 1 / sum_c E_rc b_uc,   P_uc = a_uu E_uc b_uc
//
// The iteration starts from a = 1. A prefix whose scores or sums leave the number range (range.h)
// is reported as unsolved. The bits of a prefix do not depend on any other prefix.
#pragma once

#include <cstddef>

#include "cluster/base/instruction_set.h"

namespace birkhoff {

struct PrefixBalance {
  int size, iterations, first_row;
  const double* scores;  // [size, size]
  double* p;             // forward: [size - first_row, size], zeros
  bool* solved;          // forward: [size - first_row]
  const double* d_p;     // backward: same shape as p
  double* d_scores;      // backward: [size, size], zeros
};

// `scratch` points to scratch_bytes() bytes, aligned to 64. The forward pass needs the same number
// of bytes for any number of iterations.
struct PrefixBalanceKernels {
  std::size_t (*scratch_bytes)(int size, int iterations, bool backward);
  void (*forward)(const PrefixBalance& balance, void* scratch);
  void (*backward)(const PrefixBalance& balance, void* scratch);
};

const PrefixBalanceKernels& prefix_balance_kernels(InstructionSet set);

// Defined in cpu_prefix.simd.cpp, compiled for kSet.
template <InstructionSet kSet>
const PrefixBalanceKernels& compiled_prefix_balance_kernels();

}  // namespace birkhoff
