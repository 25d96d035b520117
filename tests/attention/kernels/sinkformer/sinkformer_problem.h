// Random problems for the GPU's kernels of doubly stochastic attention, and the reference's results
// for them. Legend: B batch, H heads, L queries, S keys, D head dim, T half-steps.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "attention/kernels/sinkformer/sinkformer.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {

struct SinkformerProblem {
  DoublyStochasticAttention attention;
  at::Tensor d_out_BHLD;

  at::Tensor& q() { return attention.q_BHLD; }
  at::Tensor& k() { return attention.k_BHSD; }
  at::Tensor& v() { return attention.v_BHSD; }

  // The same values in another type or on another device.
  SinkformerProblem to(at::ScalarType dtype, at::Device device = at::kCPU) const {
    SinkformerProblem there = *this;
    for (at::Tensor* x : {&there.q(), &there.k(), &there.v(), &there.d_out_BHLD}) {
      *x = x->to(device, dtype);
    }
    for (at::Tensor* x : {&there.attention.query_lengths_B, &there.attention.key_lengths_B}) {
      if (x->defined()) *x = x->to(device);
    }
    return there;
  }
  std::string name() const {
    return fmt::format("L {} S {} D {} T {}", attention.q_BHLD.size(2), attention.k_BHSD.size(2),
                       attention.q_BHLD.size(3), attention.half_steps);
  }
};

struct SinkformerSizes {
  std::int64_t L = 1, S = 1, D = 64;
  int half_steps = 3;
  std::int64_t B = 1, H = 1;
  double size = 1;  // of queries and keys: logits are about its square
};

inline SinkformerProblem make_sinkformer_problem(const SinkformerSizes& sizes, at::ScalarType dtype,
                                                 std::uint64_t seed) {
  const auto rows = [&](std::int64_t count, double size, std::uint64_t number) {
    return (random_tensor({sizes.B, sizes.H, count, sizes.D}, at::kDouble, 4 * seed + number) *
            size)
        .to(dtype);
  };
  SinkformerProblem problem;
  problem.q() = rows(sizes.L, sizes.size, 0);
  problem.k() = rows(sizes.S, sizes.size, 1);
  problem.v() = rows(sizes.S, 1, 2);
  problem.d_out_BHLD = rows(sizes.L, 1, 3);
  problem.attention.half_steps = sizes.half_steps;
  return problem;
}

// Of two sequences, with padding; the second one is as long as the tensors.
inline SinkformerProblem with_padding(SinkformerProblem problem, std::int64_t num_queries,
                                      std::int64_t num_keys) {
  const auto lengths = [](const at::Tensor& x, std::int64_t first) {
    return at::tensor({first, x.size(2)}, at::kLong);
  };
  problem.attention.query_lengths_B = lengths(problem.q(), num_queries);
  problem.attention.key_lengths_B = lengths(problem.k(), num_keys);
  return problem;
}

// Returns out, d_q, d_k and d_v.
inline std::vector<at::Tensor> solve(SinkformerProblem problem, Path path) {
  for (at::Tensor* x : {&problem.q(), &problem.k(), &problem.v()}) {
    *x = x->detach().requires_grad_(true);
  }
  const at::Tensor out = attend_doubly_stochastic(problem.attention, path);
  std::vector<at::Tensor> results =
      torch::autograd::grad({out}, {problem.q(), problem.k(), problem.v()}, {problem.d_out_BHLD});
  results.insert(results.begin(), out.detach());
  return results;
}

// Checks that the errors of `kernel` (as from solve()) against fp64 are at most twice those of the
// reference in the same type, plus one rounding of the largest value.
inline void expect_errors_of_reference(const std::vector<at::Tensor>& kernel,
                                       const SinkformerProblem& problem) {
  const std::vector<at::Tensor> exact = solve(problem.to(at::kDouble), Path::kReference),
                                reference = solve(problem, Path::kReference);
  const char* const names[] = {", out", ", d_q", ", d_k", ", d_v"};
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    expect_as_exact(kernel[i], reference[i], exact[i], problem.name() + names[i]);
  }
}

}  // namespace birkhoff::test
