// The source code of the GPU block-mixing kernels, run on the CPU by an emulated block of threads,
// against fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/block_mix/gpu_few_blocks.h"
#include "attention/kernels/block_mix/gpu_mix.h"
#include "attention/kernels/block_mix/gpu_products.h"
#include "tests/attention/kernels/block_mix/block_mix_problem.h"
#include "tests/cluster/base/emulated_gpu.h"

namespace birkhoff::test {
namespace {

template <EmulatedNumber kNumber, bool kBackward>
void run_kernels(const BlockMixParams& params, bool backwards) {
  using Thread = EmulatedThread<kNumber>;
  for_each_mix_kernel<Thread, kBackward>(params, [&]<typename Body>(int shared_bytes) {
    EmulatedBlock block(Body::kThreads, static_cast<std::uint32_t>(shared_bytes));
    for (std::int64_t task = 0; task < Body::num_tasks(params); ++task) {
      block.run(task, backwards, [&](int thread) { Body(Thread(block, thread), params).run(); });
    }
  });
}

// Returns d_w, then y and d_x of each tensor. `backwards` reverses the order in which threads run.
std::vector<at::Tensor> solve(const MixProblem& problem, bool backwards = false) {
  EXPECT_EQ(why_not_gpu_kernels(problem.x_BHNbD), "") << problem.name;
  std::vector<at::Tensor> x, d_y, others, y, d_x;
  for (std::size_t i = 0; i < problem.x_BHNbD.size(); ++i) {
    x.push_back(with_aligned_rows(problem.x_BHNbD[i]));
    d_y.push_back(with_aligned_rows(problem.d_y_BHNbD[i]));
    const at::Tensor& other = problem.others_BHNbD[i];
    others.push_back(other.defined() ? with_aligned_rows(other) : other);
    // Numbers that a kernel forgets to write stay NaN.
    y.push_back(new_blocks_like(x[i]).fill_(NAN));
    d_x.push_back(new_blocks_like(x[i]).fill_(NAN));
  }
  const bool padded = problem.lengths_B.defined();
  const at::Tensor sets = padded ? at::stack({problem.weights_BHNN, problem.last_weights_BHNN})
                                 : problem.weights_BHNN.unsqueeze(0);
  const MixOperands operands{block_mix_weights(sets, x[0].scalar_type()), problem.lengths_B, x,
                             problem.diagonal};
  const at::Tensor d_weights = new_block_mix_d_weights(operands).fill_(NAN);
  const BlockMixParams forward = block_mix_params(operands, y),
                       backward = block_mix_params(operands, d_y, others, d_x, d_weights);
  if (forward.dtype == KernelDtype::kHalf) {
    run_kernels<EmulatedNumber::kHalf, false>(forward, backwards);
    run_kernels<EmulatedNumber::kHalf, true>(backward, backwards);
  } else {
    run_kernels<EmulatedNumber::kBFloat16, false>(forward, backwards);
    run_kernels<EmulatedNumber::kBFloat16, true>(backward, backwards);
  }
  const at::Tensor d_sets = d_weights.sum(1);
  std::vector<at::Tensor> result{padded ? d_sets : d_sets[0]};
  for (std::size_t i = 0; i < x.size(); ++i) result.insert(result.end(), {y[i], d_x[i]});
  return result;
}

void check(const MixProblem& problem) { expect_mixes(solve(problem), problem); }

// Ragged tiles of rows and columns, triangles and whole matrices.
TEST(BlockMixEmulation, EachDiagonal) {
  std::uint64_t seed = 0;
  for (const std::int64_t blocks : {1, 3, 16, 33, 70, 130}) {
    for (const std::int64_t diagonal : {std::int64_t{-1}, std::int64_t{0}, blocks - 1}) {
      ++seed;
      check(make_mix_problem({.blocks = blocks, .head_dim = 40}, diagonal, at::kBFloat16,
                             seed % 2 == 0, 1, seed));
    }
  }
}

TEST(BlockMixEmulation, OtherDiagonals) {
  for (const std::int64_t diagonal : {-100, -65, -64, -17, 17, 64, 65}) {
    check(make_mix_problem({.blocks = 100, .block = 1, .head_dim = 8}, diagonal, at::kBFloat16,
                           false, 1, 50));
  }
}

TEST(BlockMixEmulation, KeysAndValuesOfManyHeads) {
  check(make_mix_problem({.batch = 2, .heads = 3, .blocks = 20, .block = 3}, -1, at::kBFloat16,
                         true, 2, 60));
  check(make_mix_problem({.batch = 2, .heads = 2, .blocks = 9, .block = 5, .head_dim = 24}, 8,
                         at::kHalf, false, 2, 61));
}

// Enough columns for d_w to be computed in parts.
TEST(BlockMixEmulation, PartsOfColumns) {
  for (const std::int64_t blocks : {10, 70}) {
    const MixProblem problem = make_mix_problem({.blocks = blocks, .block = 37, .head_dim = 64}, -1,
                                                at::kHalf, true, 2, 62);
    const MixOperands operands{problem.weights_BHNN.unsqueeze(0), {}, problem.x_BHNbD, -1};
    EXPECT_GT(new_block_mix_d_weights(operands).size(1), 1);
    check(problem);
  }
}

// Samples that end at a block's end, inside a block, before its second token and after its last
// but one, in the first block and in the last, and an empty one; slabs with columns of both sets
// and of one.
TEST(BlockMixEmulation, PaddingIsNotRead) {
  std::uint64_t seed = 120;
  for (const std::int64_t blocks : {3, 16, 20, 40, 70}) {
    for (const std::int64_t block : {1, 5, 13}) {
      const std::int64_t length = blocks * block;
      const std::vector<std::int64_t> lengths{length,
                                              std::max<std::int64_t>(1, length - 1),
                                              block + std::min<std::int64_t>(1, block - 1),
                                              block / 2,
                                              0,
                                              (blocks - 1) * block,
                                              2 * block + block / 2};
      ++seed;
      check(make_padded_mix_problem({.batch = std::ssize(lengths),
                                     .heads = 1,
                                     .blocks = blocks,
                                     .block = block,
                                     .head_dim = seed % 3 == 0 ? 72 : 16},
                                    lengths, seed % 2 == 0 ? at::kHalf : at::kBFloat16,
                                    seed % 2 == 0, seed % 3 == 0 ? 2 : 1, seed));
    }
  }
}

// Slabs that end inside a token's columns and hold fewer columns than a warp's.
TEST(BlockMixEmulation, FewBlocksWithRaggedSlabs) {
  std::uint64_t seed = 80;
  for (const std::int64_t blocks : {1, 7, 16, 17, 32, 33, 64}) {
    for (const std::int64_t diagonal : {std::int64_t{-1}, blocks - 1}) {
      ++seed;
      check(make_mix_problem({.blocks = blocks, .block = 13, .head_dim = 72}, diagonal,
                             at::kBFloat16, seed % 2 == 0, 2, seed));
    }
  }
}

TEST(BlockMixEmulation, MostBlocks) {
  check(make_mix_problem({.blocks = 256, .block = 1, .head_dim = 8}, -1, at::kBFloat16, false, 1,
                         63));
  check(make_mix_problem({.blocks = BlockMixParams::kMaxBlocks, .block = 1, .head_dim = 8}, -1,
                         at::kHalf, false, 1, 64));
}

TEST(BlockMixEmulation, SameBitsInAnyOrderOfThreads) {
  for (const std::int64_t blocks : {12, 24, 40, 70}) {
    const MixProblem problem =
        make_mix_problem({.heads = 2, .blocks = blocks}, -1, at::kBFloat16, true, 2, 65);
    const auto forwards = solve(problem), backwards = solve(problem, true);
    for (std::size_t i = 0; i < forwards.size(); ++i) {
      EXPECT_TRUE(at::equal(forwards[i], backwards[i])) << blocks << " blocks, tensor " << i;
    }
  }
}

// All heads share the weights of one. Products above the diagonal are not computed, not even where
// an operand is NaN.
TEST(BlockMixEmulation, LaterBlocksAreNotRead) {
  MixProblem problem =
      make_mix_problem({.batch = 2, .heads = 2, .blocks = 70}, -1, at::kBFloat16, false, 1, 66);
  problem.weights_BHNN =
      problem.weights_BHNN.narrow(0, 0, 1).narrow(1, 0, 1).expand({2, 2, 70, 70});
  check(problem);
  MixProblem broken = problem;
  broken.x_BHNbD[0] = problem.x_BHNbD[0].clone();
  broken.x_BHNbD[0].narrow(2, 48, 22).fill_(NAN);
  EXPECT_TRUE(at::equal(solve(problem)[1].narrow(2, 0, 48), solve(broken)[1].narrow(2, 0, 48)));
}

template <bool kTransposed>
void check_tiles(int blocks, int diagonal) {
  const int tiles = BlockMixShape::tiles(blocks);
  std::set<std::pair<int, int>> listed;
  int results = 0;
  MixTiles<kTransposed> steps(blocks, diagonal);
  while (steps.next()) {
    EXPECT_TRUE(listed.insert({steps.result(), steps.source()}).second);
    EXPECT_LT(steps.source(), blocks);
    EXPECT_EQ(steps.result(), results * kTileRows);
    if (steps.ends_result()) ++results;
  }
  EXPECT_EQ(results, tiles) << blocks << ", " << diagonal;
  for (int u = 0; u < blocks; u += kTileRows) {
    for (int v = 0; v < blocks; v += kTileRows) {
      const bool needed = v <= std::min(u + kTileRows, blocks) - 1 + diagonal;
      const bool is_listed = listed.count(kTransposed ? std::pair{v, u} : std::pair{u, v}) > 0;
      EXPECT_TRUE(is_listed || !needed) << blocks << ", " << diagonal << ": " << u << ", " << v;
    }
  }
  // Tiles wholly above the diagonal are skipped, unless a result tile would have none left.
  if (diagonal == -1) {
    EXPECT_EQ(listed.size(), static_cast<std::size_t>(tiles * (tiles + 1) / 2));
  }
}

TEST(BlockMixEmulation, TilesOfTheTriangleAreListedOnce) {
  for (const int blocks : {1, 64, 65, 200, 512}) {
    for (const int diagonal : {-blocks, -65, -64, -1, 0, 1, 64, blocks - 1}) {
      if (diagonal < -blocks || diagonal >= blocks) continue;
      check_tiles<false>(blocks, diagonal);
      check_tiles<true>(blocks, diagonal);
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
