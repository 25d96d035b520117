// The GPU kernels of attention with a sparse normalizer are as exact as the reference.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "tests/attention/kernels/row_normalizer/row_attention_problem.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

std::vector<at::Tensor> solve_once(const RowAttentionProblem& problem) {
  RowAttention in = problem.attention;
  in.first_BL = in.first_BL.cuda();
  in.end_BL = in.end_BL.cuda();
  const auto leaf = [](const at::Tensor& x) { return x.cuda().set_requires_grad(true); };
  std::vector<at::Tensor> leaves;
  for (at::Tensor* x :
       {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.normalizer.alpha_H, &in.distance_terms_BHLS}) {
    if (x->defined()) leaves.push_back(*x = leaf(*x));
  }
  EXPECT_EQ(why_not_row_kernels(in), "");
  const at::Tensor out = attend_rows(in);
  std::vector<at::Tensor> results{out.detach().cpu()};
  for (const at::Tensor& d : torch::autograd::grad({out}, leaves, {problem.d_out_BHLD.cuda()})) {
    results.push_back(d.cpu());
  }
  return results;
}

std::vector<at::Tensor> solve_rows_on_gpu(const RowAttentionProblem& problem) {
  const std::vector<at::Tensor> results = solve_once(problem), again = solve_once(problem);
  for (std::size_t i = 0; i < results.size(); ++i) {
    expect_same_bits(results[i], again[i], "result " + std::to_string(i));
  }
  return results;
}

void expect_as_exact_on_gpu(const std::vector<RowAttentionSize>& sizes) {
  const std::vector<RowNormalizer> normalizers = {
      {.kind = Normalizer::kTopK, .top_k = 1},
      {.kind = Normalizer::kTopK, .top_k = 8},
      {.kind = Normalizer::kTopK, .top_k = 64},
      {.kind = Normalizer::kSparsemax},
      {.kind = Normalizer::kEntmax15},
      {.kind = Normalizer::kEntmax, .alpha_H = at::tensor({1.1, 1.7}, at::kFloat)}};
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const RowAttentionSize& size : sizes) {
      for (const RowNormalizer& each : normalizers) {
        expect_errors_of_the_reference(
            random_rows(size, each, dtype), solve_rows_on_gpu,
            fmt::format("normalizer {}, k {}, causal {}", static_cast<int>(each.kind), each.top_k,
                        size.causal));
      }
    }
  }
}

// Also run under compute-sanitizer.
TEST(RowAttentionKernel, SmallIsAsExactAsTheReference) {
  expect_as_exact_on_gpu({{150, 150, 64, true},
                          {70, 133, 40, false},
                          {133, 70, 128, false},
                          {70, 150, 64, true, /*distances=*/true}});
}

TEST(RowAttentionKernel, LongIsAsExactAsTheReference) {
  expect_as_exact_on_gpu(
      {{1500, 1500, 64, true}, {1000, 2000, 128, false}, {1000, 1500, 128, true, true}});
}

}  // namespace
}  // namespace birkhoff::test
