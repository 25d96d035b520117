// The GPU block-pooling kernels give the bits of the CPU loops.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/attention/kernels/block_pool/block_pool_problem.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

void check(const PoolProblem& problem, at::ScalarType dtype) {
  const at::Tensor x_BLC = problem.x_BLC.to(dtype);
  const auto there = [](const at::Tensor& x) { return x.defined() ? x.to(at::kCUDA) : x; };
  PoolProblem on_gpu = problem;
  on_gpu.pooling.mask_BNb = there(problem.pooling.mask_BNb);
  on_gpu.pooling.divisor_BN1 = there(problem.pooling.divisor_BN1);
  on_gpu.pooling.links_BN = there(problem.pooling.links_BN);
  on_gpu.d_psi_BNC = there(problem.d_psi_BNC);
  const auto results = solve(on_gpu, there(x_BLC)), expected = solve(problem, x_BLC.to(at::kFloat));
  expect_same_bits(results[0], expected[0], c10::toString(dtype));
  expect_same_bits(results[1], expected[1].to(dtype), c10::toString(dtype));
}

// Also run under compute-sanitizer.
TEST(BlockPoolKernel, SmallShapesHaveTheBitsOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const PoolProblem& problem : pool_problems()) check(problem, dtype);
  }
}

TEST(BlockPoolKernel, ManyBlocks) {
  PoolProblem problem;
  problem.x_BLC = random_tensor({4, 4096, 512}, at::kFloat, 1);
  problem.pooling.block = 64;
  problem.d_psi_BNC = random_tensor({4, 64, 512}, at::kFloat, 2);
  for (const bool cumulative : {false, true}) {
    problem.pooling.cumulative = cumulative;
    check(problem, at::kBFloat16);
  }
}

}  // namespace
}  // namespace birkhoff::test
