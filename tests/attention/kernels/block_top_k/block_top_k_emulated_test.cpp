// The GPU kernel that chooses blocks, run on the CPU, against the definition. Legend: B batch, H
// heads, L tokens, C chosen blocks, D head dim.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "attention/kernels/block_top_k/gpu_arguments.h"
#include "tests/attention/kernels/block_top_k/block_top_k_problem.h"
#include "tests/attention/kernels/clusters/clusters_emulated.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// The result holds other numbers before.
at::Tensor emulate(const BlockTopK& choice) {
  EXPECT_EQ(why_not_gpu_kernels(choice), "");
  const GpuChoice gpu = gpu_top_k(choice, WholeBlocks(choice));
  gpu.chosen_BHLC.fill_(12345);
  emulate_block_choice(gpu.params);
  return gpu.chosen_BHLC;
}

TEST(BlockTopKKernel, IsTheDefinition) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    int chosen_blocks = 0;
    for (const BlockTopK& choice : block_top_ks(dtype)) {
      chosen_blocks += expect_blocks_of_the_definition(choice, emulate(choice));
    }
    EXPECT_GT(chosen_blocks, 1000);
  }
}

// More blocks than a tile has, wide heads, and the layers' layout of q.
TEST(BlockTopKKernel, ManyBlocks) {
  for (const auto& [head_dim, others] : {std::pair(5, 64), {256, 3}, {64, 9}}) {
    BlockTopK choice = random_choice(140, 2, others, true, at::kFloat, true, head_dim);
    choice.q_BHLD = choice.q_BHLD.transpose(1, 2).contiguous().transpose(1, 2);
    EXPECT_GT(expect_blocks_of_the_definition(choice, emulate(choice)), 1000);
  }
}

TEST(BlockTopKKernel, TheEarlierOfEqualBlocksWinsAndNaNIsTheLargest) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    BlockTopK choice = random_choice(24, 4, 3, true, dtype, false);
    choice.k_BHLD = at::ones_like(choice.k_BHLD);
    EXPECT_TRUE(at::equal(emulate(choice)[1][2][23], at::tensor({0, 1, 2}, at::kInt)));
    choice.k_BHLD[1][2][13].fill_(std::nan(""));
    EXPECT_TRUE(at::equal(emulate(choice)[1][2][23], at::tensor({3, 0, 1}, at::kInt)));
  }
}

}  // namespace
}  // namespace birkhoff::test
