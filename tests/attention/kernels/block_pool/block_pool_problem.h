// Random block-pooling problems. Legend: B batch, L tokens, N blocks, b tokens of a block, C
// channels.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <cstdint>
#include <vector>

#include "attention/kernels/block_pool/block_pool.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {

struct PoolProblem {
  at::Tensor x_BLC;  // fp32
  BlockPooling pooling;
  at::Tensor d_psi_BNC;
};

// Whole and ragged blocks; channels that fit vectors and some that do not; with and without masks,
// divisors and links.
inline std::vector<PoolProblem> pool_problems() {
  std::vector<PoolProblem> problems;
  std::uint64_t seed = 0;
  for (const auto& [L, b, C] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {7, 3, 5}, {33, 8, 136}, {64, 16, 8}, {90, 5, 16}, {20, 32, 24}}) {
    for (int choice = 0; choice < 16; ++choice) {
      const std::int64_t N = (L + b - 1) / b;
      const auto values = [&](at::IntArrayRef sizes) {
        return random_tensor(sizes, at::kFloat, ++seed);
      };
      PoolProblem problem{.x_BLC = values({2, L, C}),
                          .pooling = {.block = b, .cumulative = choice % 2 != 0},
                          .d_psi_BNC = values({2, N, C})};
      BlockPooling& pooling = problem.pooling;
      if (choice & 2) pooling.mask_BNb = values({choice & 4 ? 1 : 2, N, b}) > -0.5;
      if (choice & 4) pooling.divisor_BN1 = values({2, N, 1}).abs() + 0.5;
      if (choice & 8)
        pooling.links_BN = values({2, N}).mul(1000).abs().to(at::kLong).remainder(8).to(at::kByte);
      problems.push_back(problem);
    }
  }
  return problems;
}

// Returns psi and d_x.
inline std::vector<at::Tensor> solve(const PoolProblem& problem, const at::Tensor& x_BLC) {
  const at::Tensor leaf = x_BLC.detach().requires_grad_(true);
  const at::Tensor psi = pool_blocks(leaf, problem.pooling);
  return {psi.detach(), torch::autograd::grad({psi}, {leaf}, {problem.d_psi_BNC})[0]};
}

}  // namespace birkhoff::test
