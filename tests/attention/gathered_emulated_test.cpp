// The GPU kernels of attention over gathered rows, run on the CPU, are as exact as the reference.
// Legend: B batch, H heads, L queries, S keys, D head dim.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "attention/kernels/gathered_attention/gpu_arguments.h"
#include "attention/kernels/gathered_attention/parts.h"
#include "tests/attention/gathered_emulated.h"
#include "tests/attention/gathered_problem.h"
#include "tests/attention/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

using torch::autograd::variable_list;

// Results as solve() returns them. Memory that the kernels must write holds NaN before.
std::vector<at::Tensor> emulate(const GatheredProblem& problem) {
  GatheredAttention in = problem.attention;
  // As attend_gathered() passes them on.
  for (at::Tensor* x :
       {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.relative.keys_HRD, &in.sink_H,
        &in.rows.band.positions_q_BHL, &in.rows.band.positions_k_BHS, &in.key_lengths_B}) {
    if (x->defined()) *x = x->detach().contiguous();
  }
  at::Tensor joined_sink;  // after the kernels
  if (in.merge == PlaceMerge::kOneSoftmax) std::swap(joined_sink, in.sink_H);
  const auto spoil = [](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& x : tensors) {
      if (x.defined()) x.fill_(NAN);
    }
  };
  const GatheredForward forward = gathered_forward(in);
  const AttentionPart& made = forward.results.part;
  spoil(forward.scratch);
  spoil({made.out_BHLD, made.max_BHL, made.sum_BHL});
  emulate_gathered_attention(forward.params);

  const bool mean = in.merge == PlaceMerge::kMean;
  variable_list inputs{made.out_BHLD.set_requires_grad(true), made.sum_BHL.set_requires_grad(true)};
  if (joined_sink.defined()) inputs.push_back(joined_sink.set_requires_grad(true));
  const AttentionPart part = joined_sink.defined() ? with_sink(made, joined_sink) : made;
  const at::Tensor lse = mean ? part.sum_BHL.gt(0).to(at::kFloat) : finite_lse(part);
  variable_list outputs{part.out_BHLD}, d_outputs{problem.d_out_BHLD};
  if (!mean) {
    outputs.push_back(lse);
    d_outputs.push_back(problem.d_lse_BHL);
  }
  const variable_list d_inputs =
      torch::autograd::grad(outputs, inputs, d_outputs, /*retain_graph=*/false,
                            /*create_graph=*/false, /*allow_unused=*/true);

  const at::NoGradGuard no_grad;
  const at::Tensor d_out = d_inputs[0].contiguous(),
                   d_sum = mean ? at::Tensor() : d_inputs[1].contiguous();
  const GatheredBackward backward = gathered_backward(in, forward.results, d_out, d_sum);
  spoil(backward.scratch);
  spoil({backward.gradients.d_q_BHLD, backward.gradients.d_k_BHSD, backward.gradients.d_v_BHSD,
         backward.d_table_NHRD, backward.d_sink_BHL});
  emulate_gathered_attention_backward(backward.params);
  const GatheredGradients gradients = finished_gradients(in, backward);
  variable_list results{part.out_BHLD.detach(), lse.detach(), gradients.d_q_BHLD,
                        gradients.d_k_BHSD, gradients.d_v_BHSD};
  if (in.relative.defined()) results.push_back(gradients.d_relative_keys_HRD);
  if (in.sink_H.defined()) results.push_back(gradients.d_sink_H);
  if (joined_sink.defined()) results.push_back(d_inputs[2]);
  return results;
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

void expect_near_the_reference(const GatheredProblem& problem) {
  const auto expected = solve(problem.to(at::kDouble), Path::kReference), kernel = emulate(problem);
  ASSERT_EQ(kernel.size(), expected.size());
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    const double scale = std::max(1.0, expected[i].abs().max().item<double>());
    EXPECT_LE(max_difference(kernel[i], expected[i]), 1e-4 * scale)
        << problem.name << " result " << i;
  }
}

// Small shapes, empty lists and single rows, for which errors are not compared.
TEST(GatheredKernel, IsNearTheReference) {
  for (int seed = 0; seed < 120; seed += 3) {
    expect_near_the_reference(random_gathered_problem(seed));
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

class GatheredKernelMergedAs : public ::testing::TestWithParam<PlaceMerge> {};
INSTANTIATE_TEST_SUITE_P(Merges, GatheredKernelMergedAs,
                         ::testing::Values(PlaceMerge::kOneSoftmax, PlaceMerge::kMean));

// Relative positions, sinks and grouped queries. Of a mean, delta comes from outputs that are not
// rounded.
TEST_P(GatheredKernelMergedAs, ErrorsWithTermsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double product_eps = out_rounding(GetParam() == PlaceMerge::kMean ? at::kFloat : dtype);
    int checked = 0;
    for (int seed = 0; seed < 60; seed += 4) {
      checked += expect_errors_of_the_reference(seed, dtype, 100, product_eps, emulate, GetParam(),
                                                random_problem_for_gpus);
    }
    EXPECT_GT(checked, 5) << dtype;
  }
}

TEST_P(GatheredKernelMergedAs, IsNearTheReferenceWithTerms) {
  for (int seed = 1; seed < 120; seed += 9) {
    GatheredProblem problem = random_problem_for_gpus(seed);
    problem.attention.merge = GetParam();
    expect_near_the_reference(problem);
  }
}

// With this many heads a block adds up the gradient of the table for all tiles of its head.
TEST_P(GatheredKernelMergedAs, BlocksOfManyTilesAddUpTheTable) {
  GatheredProblem problem = window_problem(1, 130, 40, 12);
  GatheredAttention& in = problem.attention;
  in.merge = GetParam();
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &problem.d_out_BHLD}) {
    *x = x->detach().narrow(3, 0, 5);
  }
  in.relative.keys_HRD = random_tensor({1, 21, 5}, at::kFloat, 9);
  in.relative.least = -20;
  expect_near_the_reference(problem.to(at::kFloat));
}

}  // namespace
}  // namespace birkhoff::test
