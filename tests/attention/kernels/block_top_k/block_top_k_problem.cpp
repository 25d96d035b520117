#include "tests/attention/kernels/block_top_k/block_top_k_problem.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {

BlockTopK random_choice(std::int64_t L, std::int64_t block, std::int64_t others, bool causal,
                        at::ScalarType dtype, bool documents, std::int64_t head_dim) {
  at::Tensor segments_BL, lengths_B;
  if (documents) {
    segments_BL = at::stack({at::arange(L) >= L / 3, at::arange(L) >= block}).to(at::kInt);
    lengths_B = at::tensor({L, L - 2}, at::kLong);
  }
  const at::Tensor q = random_tensor({2, 3, L, head_dim}, dtype, 1),
                   k = random_tensor({2, 3, L, head_dim}, dtype, 2);
  return {.q_BHLD = q,
          .k_BHLD = k,
          .documents = {segments_BL, lengths_B, q, /*num_documents=*/0},
          .block = block,
          .others = others,
          .causal = causal};
}

std::vector<BlockTopK> block_top_ks(at::ScalarType dtype) {
  std::vector<BlockTopK> choices;
  for (const bool causal : {false, true}) {
    for (const bool documents : {false, true}) {
      for (const auto& [L, block, others] :
           {std::tuple(30, 4, 2), {70, 4, 20}, {9, 16, 3}, {64, 16, 1}, {5, 1, 2}, {12, 4, 0}}) {
        choices.push_back(random_choice(L, block, others, causal, dtype, documents));
      }
    }
  }
  return choices;
}

std::vector<int> blocks_of(const BlockTopK& choice, std::int64_t b, std::int64_t h,
                           std::int64_t t) {
  const std::int64_t L = choice.k_BHLD.size(2), size = choice.block;
  const at::Tensor& number_BL = choice.documents.number_BL;
  const auto number = [&](std::int64_t token) {
    return number_BL.const_data_ptr<int>()[(number_BL.size(0) == 1 ? 0 : b) * L + token];
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

int expect_blocks_of_the_definition(const BlockTopK& choice, const at::Tensor& chosen_BHLC) {
  int count = 0;
  const std::int64_t B = chosen_BHLC.size(0), H = chosen_BHLC.size(1);
  for (std::int64_t head = 0; head < B * H; ++head) {
    for (std::int64_t t = 0; t < chosen_BHLC.size(2); ++t) {
      std::vector<int> expected = blocks_of(choice, head / H, head % H, t);
      count += static_cast<int>(expected.size());
      expected.resize(static_cast<std::size_t>(chosen_BHLC.size(3)), -1);
      const at::Tensor chosen_C = chosen_BHLC[head / H][head % H][t];
      EXPECT_TRUE(at::equal(chosen_C, at::tensor(expected, at::kInt)))
          << "tokens " << chosen_BHLC.size(2) << " block " << choice.block << " causal "
          << choice.causal << " query " << t << chosen_C;
    }
  }
  return count;
}

}  // namespace birkhoff::test
