// Random problems of attention over gathered rows. Legend: B batch, H heads, L queries, S keys, D
// head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff::testing {

struct GatheredProblem {
  GatheredAttention attention;  // q, k and v are leaves
  at::Tensor d_out_BHLD, d_lse_BHL;
  std::string name;

  GatheredProblem to(at::ScalarType dtype) const;
  std::vector<at::Tensor> leaves() const {
    return {attention.q_BHLD, attention.k_BHSD, attention.v_BHSD};
  }
};

// Segments of unequal length, some empty, with rows that are in several, in one several times, or
// in none; every rule for what is visible; tensors that are contiguous and some that are not.
// `seed` determines everything except the numbers of tensors, which also depend on `draw_index`.
GatheredProblem random_gathered_problem(int seed, int draw_index = 0);

// The log-sum-exp of each query, 0 for those that see no key.
at::Tensor finite_lse(const AttentionPart& part);
// Returns out, log-sum-exp, and the gradients of q, k and v.
std::vector<at::Tensor> results_of(const AttentionPart& part, const GatheredProblem& problem);
std::vector<at::Tensor> solve(const GatheredProblem& problem, Path path);

}  // namespace birkhoff::testing
