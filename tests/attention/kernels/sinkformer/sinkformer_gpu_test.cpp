// The GPU's kernels of doubly stochastic attention, against fp64 on the CPU and against themselves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/attention/kernels/sinkformer/sinkformer_problem.h"

namespace birkhoff::test {
namespace {

std::vector<at::Tensor> solve_on_gpu(const SinkformerProblem& problem) {
  const SinkformerProblem there = problem.to(problem.d_out_BHLD.scalar_type(), at::kCUDA);
  EXPECT_EQ(choose_path(there.attention, Path::kFused), Path::kFused) << problem.name();
  return solve(there, Path::kFused);
}

void check(const SinkformerProblem& problem) {
  const std::vector<at::Tensor> results = solve_on_gpu(problem), again = solve_on_gpu(problem);
  expect_errors_of_reference(results, problem);
  for (std::size_t i = 0; i < results.size(); ++i) {
    expect_same_bits(results[i], again[i], problem.name());
  }
}

// Also run under compute-sanitizer: every kernel, ragged tiles and padding.
TEST(SinkformerKernel, SmallShapes) {
  std::uint64_t seed = 0;
  for (const std::int64_t D : {8, 40, 64, 128}) {
    for (const int half_steps : {1, 3, 5}) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
        ++seed;
        check(with_padding(
            make_sinkformer_problem(
                {.L = 70, .S = 130, .D = D, .half_steps = half_steps, .B = 2, .H = 2}, dtype, seed),
            37, 101));
      }
    }
  }
}

TEST(SinkformerKernel, SmallSequencesWithoutQueriesOrKeys) {
  for (const auto& [n, m] : {std::pair(0, 20), {20, 0}, {0, 0}}) {
    check(
        with_padding(make_sinkformer_problem({.L = 33, .S = 20, .B = 2}, at::kBFloat16, 50), n, m));
  }
}

TEST(SinkformerKernel, TheTruncatedGradient) {
  SinkformerProblem problem =
      make_sinkformer_problem({.L = 300, .S = 200, .half_steps = 5}, at::kBFloat16, 60);
  problem.attention.gradient = BalanceGradient::kTruncated;
  check(problem);
}

// Enough thread blocks to fill all multiprocessors several times.
TEST(SinkformerKernel, ManyRows) {
  check(make_sinkformer_problem({.L = 1000, .S = 1000, .half_steps = 7, .B = 2, .H = 8},
                                at::kBFloat16, 70));
  check(make_sinkformer_problem({.L = 1500, .S = 700, .D = 128, .B = 2, .H = 8}, at::kHalf, 71));
}

TEST(SinkformerKernel, LargeLogits) {
  check(
      make_sinkformer_problem({.L = 130, .S = 80, .half_steps = 9, .size = 6}, at::kBFloat16, 80));
}

}  // namespace
}  // namespace birkhoff::test
