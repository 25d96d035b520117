// Mixture of Block Attention and its choice of blocks, against loops over the definition. Legend: B
// batch, H heads, L tokens, N blocks, C chosen blocks, D head dim.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/kernels/block_choice/block_choice.h"
#include "tests/attention/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr Path kBoth[] = {Path::kReference, Path::kFused};

BlockChoice random_choice(std::int64_t L, std::int64_t block, std::int64_t others, bool causal,
                          at::ScalarType dtype, int documents) {
  at::Tensor segments_BL, lengths_B;
  if (documents > 0) {
    segments_BL = at::stack({at::arange(L) >= L / 3, at::arange(L) >= block}).to(at::kInt);
    lengths_B = at::tensor({L, L - 2}, at::kLong);
  }
  const at::Tensor q = random_tensor({2, 3, L, 8}, dtype, 1),
                   k = random_tensor({2, 3, L, 8}, dtype, 2);
  return {.q_BHLD = q,
          .k_BHLD = k,
          .documents = {segments_BL, lengths_B, q},
          .block = block,
          .others = others,
          .causal = causal};
}

// The blocks of query t of one head in the order of the definition.
std::vector<int> blocks_of(const BlockChoice& choice, std::int64_t b, std::int64_t h,
                           std::int64_t t) {
  const std::int64_t L = choice.k_BHLD.size(2), size = choice.block;
  const at::Tensor& number_BL = choice.documents.number_BL;
  const auto number = [&](std::int64_t token) {
    return number_BL[number_BL.size(0) == 1 ? 0 : b][token].item<int>();
  };
  if (number(t) < 0) return {};
  const at::Tensor q = choice.q_BHLD[b][h][t].to(at::kDouble);
  std::vector<std::pair<double, int>> open;  // less their product, so that the best sorts first
  for (int n = 0; (n + 1) * size <= L; ++n) {
    const bool in_order = choice.causal ? n < t / size : n != t / size;
    bool same = true;
    for (std::int64_t token = n * size; token < (n + 1) * size; ++token) {
      same = same && number(token) == number(t);
    }
    if (!in_order || !same) continue;
    const at::Tensor mean = choice.k_BHLD[b][h].narrow(0, n * size, size).to(at::kDouble).mean(0);
    open.emplace_back(-q.dot(mean).item<double>(), n);
  }
  std::sort(open.begin(), open.end());
  std::vector<int> blocks;
  for (const auto& [less, n] : open) {
    if (static_cast<std::int64_t>(blocks.size()) < choice.others) blocks.push_back(n);
  }
  return blocks;
}

TEST(BlockChoice, IsTheDefinition) {
  int chosen_blocks = 0;
  for (const bool causal : {false, true}) {
    for (const int documents : {0, 1}) {
      for (const auto& [L, block, others] :
           {std::tuple(30, 4, 2), {70, 4, 20}, {9, 16, 3}, {64, 16, 1}, {5, 1, 2}, {12, 4, 0}}) {
        const BlockChoice choice = random_choice(L, block, others, causal, at::kDouble, documents);
        for (const Path path : kBoth) {
          const at::Tensor chosen_BHLC = choose_blocks(choice, path);
          for (std::int64_t head = 0; head < 6; ++head) {
            for (std::int64_t t = 0; t < L; ++t) {
              std::vector<int> expected = blocks_of(choice, head / 3, head % 3, t);
              chosen_blocks += static_cast<int>(expected.size());
              expected.resize(static_cast<std::size_t>(chosen_BHLC.size(3)), -1);
              const at::Tensor chosen_C = chosen_BHLC[head / 3][head % 3][t];
              ASSERT_TRUE(at::equal(chosen_C, at::tensor(expected, at::kInt)))
                  << "L " << L << " block " << block << " causal " << causal << " query " << t
                  << chosen_C;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(chosen_blocks, 1000);
}

TEST(BlockChoice, TheEarlierOfEqualBlocksWinsAndNaNIsTheLargest) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    BlockChoice choice = random_choice(24, 4, 3, true, dtype, 0);
    choice.k_BHLD = at::ones_like(choice.k_BHLD);
    for (const Path path : kBoth) {
      EXPECT_TRUE(
          at::equal(choose_blocks(choice, path)[1][2][23], at::tensor({0, 1, 2}, at::kInt)));
    }
    choice.k_BHLD[1][2][13].fill_(std::nan(""));
    for (const Path path : kBoth) {
      EXPECT_TRUE(
          at::equal(choose_blocks(choice, path)[1][2][23], at::tensor({3, 0, 1}, at::kInt)));
    }
  }
}

TEST(BlockChoice, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  const BlockChoice choice = random_choice(500, 16, 4, true, at::kBFloat16, 1);
  at::set_num_threads(1);
  const at::Tensor one = choose_blocks(choice, Path::kFused);
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(choose_blocks(choice, Path::kFused), one));
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
    for (const int documents : {0, 1}) {
      BlockChoice choice = random_choice(30, 4, 2, causal, at::kDouble, documents);
      const Built built(
          moba(4, 3),
          {.channels = 5, .heads = 3, .head_dim = 8, .sequence_length = 32, .causal = causal},
          at::kDouble);
      AttentionInput in;
      in.q_BHLD = choice.q_BHLD;
      in.k_BHSD = choice.k_BHLD;
      in.v_BHSD = random_tensor(choice.k_BHLD.sizes(), at::kDouble, 3);
      if (documents > 0) {
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
