// The GPU block-mixing kernels, against fp64 on the CPU and against themselves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/block_mix/gpu_mix.h"
#include "tests/attention/kernels/block_mix/block_mix_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

std::vector<at::Tensor> solve_on_gpu(const MixProblem& problem) {
  const MixProblem there = problem.to(at::kCUDA);
  const bool padded = there.lengths_B.defined();
  const auto leaf = [](const at::Tensor& w) {
    return w.defined() ? w.detach().requires_grad_(true) : w;
  };
  const at::Tensor weights = leaf(there.weights_BHNN);
  const MixPadding padding{there.lengths_B, leaf(there.last_weights_BHNN)};
  std::vector<at::Tensor> x, leaves{weights};
  if (padded) leaves.push_back(padding.weights_BHNN);
  const std::size_t first_x = leaves.size();
  for (const at::Tensor& each : there.x_BHNbD) {
    x.push_back(each.detach().requires_grad_(true));
    leaves.push_back(x.back());
  }
  EXPECT_EQ(why_not_gpu_kernels(x), "") << problem.name;
  const auto [y, x_again] =
      mix_lower_blocks(weights, x, problem.diagonal, Path::kFused, {}, padding);
  std::vector<at::Tensor> outputs = y, d_outputs = there.d_y_BHNbD;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!there.others_BHNbD[i].defined()) continue;
    outputs.push_back(x_again[i]);
    d_outputs.push_back(there.others_BHNbD[i]);
  }
  const std::vector<at::Tensor> d = torch::autograd::grad(outputs, leaves, d_outputs);
  std::vector<at::Tensor> result{padded ? at::stack({d[0], d[1]}) : d[0]};
  for (std::size_t i = 0; i < y.size(); ++i) {
    result.insert(result.end(), {y[i].detach(), d[first_x + i]});
  }
  return result;
}

void check(const MixProblem& problem) {
  const std::vector<at::Tensor> results = solve_on_gpu(problem), again = solve_on_gpu(problem);
  expect_mixes(results, problem);
  for (std::size_t i = 0; i < results.size(); ++i) {
    expect_same_bits(results[i], again[i], problem.name);
  }
}

// Also run under compute-sanitizer: every kernel, ragged tiles.
TEST(BlockMixKernel, SmallShapes) {
  std::uint64_t seed = 0;
  for (const std::int64_t blocks : {1, 16, 33, 70}) {
    for (const std::int64_t diagonal : {std::int64_t{-1}, std::int64_t{0}, blocks - 1}) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
        ++seed;
        check(make_mix_problem({.batch = 2, .heads = 2, .blocks = blocks, .head_dim = 40}, diagonal,
                               dtype, seed % 3 == 0, 2, seed));
      }
    }
  }
}

TEST(BlockMixKernel, SmallPaddingIsNotRead) {
  for (const std::int64_t blocks : {16, 40, 70}) {
    const std::vector<std::int64_t> lengths{blocks * 13, blocks * 13 - 1, 14, 6, 30};
    check(make_padded_mix_problem(
        {.batch = 5, .heads = 2, .blocks = blocks, .block = 13, .head_dim = 72}, lengths,
        at::kBFloat16, true, 2, static_cast<std::uint64_t>(blocks)));
  }
}

TEST(BlockMixKernel, MostBlocks) {
  for (const std::int64_t blocks : {255, 256, BlockMixParams::kMaxBlocks + 0}) {
    check(make_mix_problem({.heads = 2, .blocks = blocks, .block = 5}, -1, at::kBFloat16, true, 2,
                           100));
  }
}

// Enough thread blocks to fill all multiprocessors several times.
TEST(BlockMixKernel, ManyBlocks) {
  check(make_mix_problem({.batch = 4, .heads = 8, .blocks = 64, .block = 64}, -1, at::kBFloat16,
                         true, 2, 101));
  check(make_mix_problem({.batch = 1, .heads = 4, .blocks = 200, .block = 64, .head_dim = 128}, -1,
                         at::kHalf, true, 2, 102));
}

// Any of the results may be unused.
TEST(BlockMixKernel, SmallUnusedResultsHaveNoGradients) {
  const MixProblem problem =
      make_mix_problem({.blocks = 5}, -1, at::kBFloat16, false, 2, 103).to(at::kCUDA);
  const at::Tensor w = problem.weights_BHNN.requires_grad_(true);
  std::vector<at::Tensor> x;
  for (const at::Tensor& each : problem.x_BHNbD) x.push_back(each.detach().requires_grad_(true));
  const auto [y, x_again] = mix_lower_blocks(w, x, problem.diagonal, Path::kFused);
  const at::Tensor d = problem.d_y_BHNbD[0];
  // Only the first tensor's mix, and only the second tensor's other use.
  const auto of_mix = torch::autograd::grad({y[0]}, {x[0], x[1]}, {d}, true, false, true);
  EXPECT_GT(of_mix[0].abs().max().item<float>(), 0);
  if (of_mix[1].defined()) {
    EXPECT_EQ(of_mix[1].abs().max().item<float>(), 0);
  }
  const auto of_x = torch::autograd::grad({x_again[1]}, {w, x[1]}, {d}, true, false, true);
  if (of_x[0].defined()) {
    EXPECT_EQ(of_x[0].abs().max().item<float>(), 0);
  }
  expect_same_bits(of_x[1], d, "other use alone");
}

}  // namespace
}  // namespace birkhoff::test
