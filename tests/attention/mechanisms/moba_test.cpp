// Mixture of Block Attention and its choice of blocks, against loops over the definition. Legend: B
// batch, H heads, L tokens, N blocks, C chosen blocks, D head dim.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/kernels/block_top_k/block_top_k.h"
#include "tests/attention/kernels/block_top_k/block_top_k_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr Path kBoth[] = {Path::kReference, Path::kFused};

TEST(BlockTopK, IsTheDefinition) {
  int chosen_blocks = 0;
  for (const BlockTopK& choice : block_top_ks(at::kDouble)) {
    for (const Path path : kBoth) {
      ASSERT_EQ(choose_path(choice, path), path);
      chosen_blocks += expect_blocks_of_the_definition(choice, select_top_blocks(choice, path));
    }
  }
  EXPECT_GT(chosen_blocks, 1000);
}

TEST(BlockTopK, TheEarlierOfEqualBlocksWinsAndNaNIsTheLargest) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    BlockTopK choice = random_choice(24, 4, 3, true, dtype, false);
    choice.k_BHLD = at::ones_like(choice.k_BHLD);
    for (const Path path : kBoth) {
      EXPECT_TRUE(
          at::equal(select_top_blocks(choice, path)[1][2][23], at::tensor({0, 1, 2}, at::kInt)));
    }
    choice.k_BHLD[1][2][13].fill_(std::nan(""));
    for (const Path path : kBoth) {
      EXPECT_TRUE(
          at::equal(select_top_blocks(choice, path)[1][2][23], at::tensor({3, 0, 1}, at::kInt)));
    }
  }
}

TEST(BlockTopK, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  const BlockTopK choice = random_choice(500, 16, 4, true, at::kBFloat16, true);
  at::set_num_threads(1);
  const at::Tensor one = select_top_blocks(choice, Path::kFused);
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(select_top_blocks(choice, Path::kFused), one));
  at::set_num_threads(threads);
}

configs::Mechanism moba(int block, int top_blocks) {
  configs::Mechanism config;
  config.mutable_moba()->set_block(block);
  config.mutable_moba()->set_top_blocks(top_blocks);
  return config;
}

// Only its own block: block-local attention. All blocks: dense attention.
TEST(Moba, OneBlockIsBlockLocalAndAllBlocksAreDense) {
  configs::Mechanism local, dense;
  local.mutable_block_local()->set_block(4);
  dense.mutable_dense();
  for (const bool causal : {false, true}) {
    // An encoder does not choose the last block unless it is whole.
    const AttentionInput in = random_input(24, at::kDouble, 3);
    const std::vector<at::Tensor> all{in.q_BHLD, in.k_BHSD, in.v_BHSD};
    for (const auto& [top, same] : {std::pair(1, &local), std::pair(100, &dense)}) {
      const Built built(moba(4, top), causal, at::kDouble), expected(*same, causal, at::kDouble);
      const at::Tensor right = run(*expected.mechanism, in, Path::kReference);
      const auto d_right = gradients(right, all);
      for (const Path path : kBoth) {
        const at::Tensor out = run(*built.mechanism, in, path);
        EXPECT_LE(max_difference(out, right), 1e-12);
        const auto d = gradients(out, all);
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_LE(max_difference(d[i], d_right[i]), 1e-12);
        }
      }
    }
  }
}

// One softmax over the keys of the chosen blocks and the query's own, with documents and padding.
TEST(Moba, IsItsDefinition) {
  for (const bool causal : {false, true}) {
    for (const bool documents : {false, true}) {
      BlockTopK choice = random_choice(30, 4, 2, causal, at::kDouble, documents);
      const Built built(
          moba(4, 3),
          {.channels = 5, .heads = 3, .head_dim = 8, .sequence_length = 32, .causal = causal},
          at::kDouble);
      AttentionInput in;
      in.q_BHLD = choice.q_BHLD;
      in.k_BHSD = choice.k_BHLD;
      in.v_BHSD = random_tensor(choice.k_BHLD.sizes(), at::kDouble, 3);
      if (documents) {
        in.segments_q_BL = in.segments_kv_BS =
            at::stack({at::arange(30) >= 10, at::arange(30) >= 4}).to(at::kInt);
        in.key_lengths_B = at::tensor({30, 28}, at::kLong);
      }
      const at::Tensor number_BL = choice.documents.number_BL.expand({2, 30});
      for (const Path path : kBoth) {
        const at::Tensor out = run(*built.mechanism, in, path);
        for (std::int64_t b = 0; b < 2; ++b) {
          for (std::int64_t t = 0; t < 30; ++t) {
            std::vector<int> blocks = blocks_of(choice, b, 1, t);
            blocks.push_back(static_cast<int>(t / 4));
            std::vector<std::int64_t> keys;
            for (const int n : blocks) {
              for (std::int64_t j = 4 * n; j < std::min<std::int64_t>(4 * n + 4, 30); ++j) {
                if (number_BL[b][j].item<int>() == number_BL[b][t].item<int>() &&
                    number_BL[b][t].item<int>() >= 0 && (!causal || j <= t)) {
                  keys.push_back(j);
                }
              }
            }
            const at::Tensor index = at::tensor(keys, at::kLong);
            const at::Tensor p =
                (at::mv(in.k_BHSD[b][1].index_select(0, index), in.q_BHLD[b][1][t]) /
                 std::sqrt(8.0))
                    .softmax(0);
            EXPECT_LE(
                max_difference(out[b][1][t], at::mv(in.v_BHSD[b][1].index_select(0, index).t(), p)),
                1e-12)
                << "causal " << causal << " documents " << documents << " query " << t;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
