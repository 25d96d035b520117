// The GPU kernels of attention over gathered rows, run on the CPU, are as exact as the reference.
// Legend: B batch, H heads, L queries, S keys, D head dim.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "attention/kernels/gathered_attention/gpu_arguments.h"
#include "tests/attention/gathered_emulated.h"
#include "tests/attention/gathered_problem.h"
#include "tests/attention/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

// Results as solve() returns them. Memory that the kernels must write holds NaN before.
std::vector<at::Tensor> emulate(const GatheredProblem& problem) {
  const at::NoGradGuard no_grad;
  GatheredAttention in = problem.attention;
  // As attend_gathered() passes them on.
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD}) *x = x->detach().contiguous();
  for (at::Tensor* x :
       {&in.rows.band.positions_q_BHL, &in.rows.band.positions_k_BHS, &in.key_lengths_B}) {
    if (x->defined()) *x = x->contiguous();
  }
  const auto spoil = [](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& x : tensors) x.fill_(NAN);
  };
  const GatheredForward forward = gathered_forward(in);
  const AttentionPart& part = forward.results.part;
  spoil(forward.scratch);
  spoil({part.out_BHLD, part.max_BHL, part.sum_BHL});
  emulate_gathered_attention(forward.params);
  const at::Tensor d_sum =
      (problem.d_lse_BHL / part.sum_BHL).masked_fill(part.sum_BHL == 0, 0).contiguous();
  const at::Tensor d_out = problem.d_out_BHLD.contiguous();
  const GatheredBackward backward = gathered_backward(in, forward.results, d_out, d_sum);
  const GatheredGradients& made = backward.gradients;
  spoil(backward.scratch);
  spoil({made.d_q_BHLD, made.d_k_BHSD, made.d_v_BHSD});
  emulate_gathered_attention_backward(backward.params);
  return {part.out_BHLD, finite_lse(part), made.d_q_BHLD, made.d_k_BHSD, made.d_v_BHSD};
}

TEST(GatheredKernel, ErrorsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    int checked = 0;
    for (int seed = 0; seed < 60; seed += 3) {
      checked += expect_errors_of_the_reference(seed, dtype, 100, out_rounding(dtype), emulate);
    }
    EXPECT_GT(checked, 5) << dtype;
  }
}

// Small shapes, empty lists and single rows, for which errors are not compared.
TEST(GatheredKernel, IsNearTheReference) {
  for (int seed = 0; seed < 120; seed += 3) {
    const GatheredProblem problem = random_gathered_problem(seed);
    const auto expected = solve(problem.to(at::kDouble), Path::kReference),
               kernel = emulate(problem);
    for (std::size_t i = 0; i < kernel.size(); ++i) {
      const double scale = std::max(1.0, expected[i].abs().max().item<double>());
      EXPECT_LE(max_difference(kernel[i], expected[i]), 1e-4 * scale)
          << problem.name << " result " << i;
    }
  }
}

TEST(GatheredKernel, WindowsAreAsExactAsTheReference) {
  const GatheredProblem problem = window_problem(1, 2, 200, 70);
  const auto exact = solve(problem.to(at::kDouble), Path::kReference);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto reference = solve(problem.to(dtype), Path::kReference),
               kernel = emulate(problem.to(dtype));
    for (std::size_t i = 0; i < kernel.size(); ++i) {
      expect_as_exact(kernel[i], reference[i], exact[i], "result " + std::to_string(i));
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
