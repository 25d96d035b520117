// The GPU block-attention kernels, against fp64 on the CPU and against themselves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "attention/kernels/block_attention/paths.h"
#include "tests/attention/kernels/block_attention/block_attention_problem.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

constexpr KeyChoice kSorted{.mask = KeyChoice::kBlocks, .bias = true}, kOwn{.causal = true};
constexpr at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf};

std::vector<at::Tensor> solve_on_gpu(const BlockProblem& problem) {
  const BlockProblem there = problem.to(problem.d_out.scalar_type(), at::kCUDA);
  EXPECT_EQ(choose_path(there.attention, Path::kFused), Path::kFused) << problem.name;
  return solve(there, Path::kFused);
}

void check(const BlockProblem& problem) {
  const std::vector<at::Tensor> results = solve_on_gpu(problem), again = solve_on_gpu(problem);
  expect_errors_of_reference(results, problem);
  for (std::size_t i = 0; i < results.size(); ++i) {
    expect_same_bits(results[i], again[i], problem.name);
  }
}

// Also run under compute-sanitizer: every kernel, ragged tiles, masks, bias and dropout.
TEST(BlockAttentionKernel, SmallShapes) {
  for (const std::int64_t head_dim : {32, 64, 96, 128, 256}) {
    check(make_block_problem({.blocks = 2, .block = 37, .head_dim = head_dim}, {kSorted, kOwn},
                             at::kBFloat16, 1, 0.2f, 1));
    check(make_block_problem({.heads = 2, .blocks = 2, .block = 70, .head_dim = head_dim},
                             {{.first_offset = -1, .causal = true, .mask = KeyChoice::kPairs}},
                             at::kHalf, 1, 0, 2));
  }
}

TEST(BlockAttentionKernel, SmallQueriesWithoutAVisibleKey) {
  check(make_block_problem({.heads = 2, .blocks = 2, .block = 24}, {{.mask = KeyChoice::kQueries}},
                           at::kHalf, 1, 0, 7));
}

// The same with sinks, grouped queries and relative positions.
TEST(BlockAttentionKernel, SmallShapesWithAllTerms) {
  for (const std::int64_t head_dim : {40, 128, 256}) {
    const BlockProblem relative = with_relative(
        make_block_problem({.heads = 2, .blocks = 2, .block = 37, .head_dim = head_dim},
                           {kSorted, kOwn}, at::kBFloat16, 1, 0.2f, 8),
        9, -8, false, 8);
    check(with_sink(relative, 8));
    check(with_distance_bias(relative, 8));
    check(with_relative(
        make_block_problem({.heads = 2,
                            .blocks = 2,
                            .block = 70,
                            .head_dim = std::min<std::int64_t>(head_dim + 1, 256)},
                           {{.first_offset = -1, .causal = true}}, at::kBFloat16, 1, 0.2f, 11),
        33, -32, true, 11, true));
    check(with_sink(
        with_relative(
            make_block_problem({.blocks = 2, .block = 70, .head_dim = head_dim, .group = 2},
                               {{.first_offset = -1, .causal = true, .mask = KeyChoice::kPairs}},
                               at::kHalf, 1, 0, 9),
            33, -32, true, 9),
        9));
  }
}

TEST(BlockAttentionKernel, SmallBlocksAreAsExactAsTheReference) {
  for (const std::int64_t block : {16, 37, 64}) {
    for (const at::ScalarType dtype : kDtypes) {
      check(make_block_problem({.batch = 2, .heads = 2, .blocks = 3, .block = block},
                               {kSorted, kOwn}, dtype, 1, 0, 3));
    }
  }
}

TEST(BlockAttentionKernel, RandomProblemsAreAsExactAsTheReference) {
  for (int seed = 0; seed < 80; ++seed) {
    check(random_block_problem(seed, kDtypes[seed % 2], 256, 256));
  }
}

// Enough thread blocks to fill all multiprocessors several times.
TEST(BlockAttentionKernel, ManyBlocks) {
  check(make_block_problem({.batch = 2, .heads = 8, .blocks = 64, .block = 64}, {kSorted, kOwn},
                           at::kBFloat16, 1, 0, 4));
  check(make_block_problem({.heads = 8, .blocks = 16, .block = 128, .head_dim = 128},
                           {{.first_offset = -1, .causal = true}}, at::kBFloat16, 1, 0, 5));
}

TEST(BlockAttentionKernel, ManyBlocksOfGroupedQueriesWithRelativePositions) {
  check(with_relative(
      make_block_problem({.batch = 2, .heads = 2, .blocks = 64, .block = 64, .group = 4},
                         {{.first_offset = -1, .causal = true}}, at::kBFloat16, 1, 0.1f, 10),
      129, -128, true, 10));
}

TEST(BlockAttentionKernel, LargeLogits) {
  check(make_block_problem({.heads = 2, .blocks = 3, .block = 64}, {kOwn}, at::kBFloat16, 6, 0, 6));
}

}  // namespace
}  // namespace birkhoff::test
