// Relative positions, sinks and grouped queries in attention over blocks and over gathered rows.
// Legend: B batch, H heads, L queries, S keys, N blocks, b tokens of a block, R rows of a table, D
// head dim.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"
#include "tests/attention/counted_bytes.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"
#include "tests/attention/kernels/gathered_attention/position_lists.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr Path kPaths[] = {Path::kReference, Path::kFused};
constexpr int kProblems = 120;

struct Operands {
  at::Tensor q_BHLD, k_BHSD, v_BHSD;
  RelativePositions relative;
  at::Tensor sink_H;

  std::vector<at::Tensor> leaves() const {
    return {q_BHLD, k_BHSD, v_BHSD, relative.keys_HRD, relative.values_HRD, sink_H};
  }
};

// Four query heads, two key heads; a table for each head or one for all.
Operands operands(std::int64_t tokens, std::int64_t least, std::int64_t rows, bool per_head) {
  const auto leaf = [](at::IntArrayRef sizes, std::uint64_t seed) {
    return random_tensor(sizes, at::kDouble, seed).set_requires_grad(true);
  };
  const std::int64_t D = 12, table_heads = per_head ? 4 : 1;
  return {.q_BHLD = leaf({2, 4, tokens, D}, 1),
          .k_BHSD = leaf({2, 2, tokens, D}, 2),
          .v_BHSD = leaf({2, 2, tokens, D}, 3),
          .relative = {.keys_HRD = leaf({table_heads, rows, D}, 4),
                       .values_HRD = leaf({table_heads, rows, D}, 5),
                       .least = least},
          .sink_H = leaf({4}, 6)};
}

// From the definition (Shaw et al. 2018, equations 3 and 4): the vectors of all pairs are written
// out. `sees` [L, S].
at::Tensor attend_pairs(const Operands& in, const at::Tensor& sees) {
  const std::int64_t L = in.q_BHLD.size(2), S = in.k_BHSD.size(2);
  const at::Tensor row_LS = (at::arange(S) - at::arange(L).unsqueeze(1) - in.relative.least)
                                .clamp(0, in.relative.keys_HRD.size(1) - 1);
  const auto of_pairs = [&](const at::Tensor& table) {  // [H, L, S, D]
    return table.index_select(1, row_LS.flatten()).unflatten(1, {L, S}).expand({4, L, S, -1});
  };
  const auto of_heads = [](const at::Tensor& x) {  // [B, H, 1, S, D]
    return at::stack({x.select(1, 0), x.select(1, 0), x.select(1, 1), x.select(1, 1)}, 1)
        .unsqueeze(2);
  };
  const at::Tensor scores =
      (in.q_BHLD.unsqueeze(3) * (of_heads(in.k_BHSD) + of_pairs(in.relative.keys_HRD))).sum(4) /
      std::sqrt(12.0);
  const at::Tensor e = scores.exp() * sees;
  const at::Tensor sum = e.sum(3, true) + in.sink_H.exp().view({1, 4, 1, 1});
  return ((e / sum).unsqueeze(4) * (of_heads(in.v_BHSD) + of_pairs(in.relative.values_HRD))).sum(3);
}

void expect_same(const at::Tensor& out, const at::Tensor& expected, const Operands& in,
                 const std::string& what) {
  EXPECT_LE(max_difference(out, expected), 1e-12) << what;
  const auto made = gradients(out, in.leaves()), right = gradients(expected, in.leaves());
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_LE(max_difference(made[i], right[i]), 1e-11) << what << " gradient " << i;
  }
}

TEST(LogitTerms, BlocksAreTheDefinition) {
  constexpr std::int64_t kTokens = 90, kBlock = 30;
  for (const bool causal : {false, true}) {
    for (const bool per_head : {false, true}) {
      const Operands in = operands(kTokens, -7, causal ? 8 : 15, per_head);
      const Blocks blocks(in.q_BHLD, TokenMasks{}, kBlock, causal);
      const at::Tensor block_L = at::arange(kTokens).div(kBlock, "floor");
      const at::Tensor distance_LS = block_L.unsqueeze(1) - block_L;
      at::Tensor sees = at::logical_and(distance_LS <= 1, distance_LS >= (causal ? 0 : -1));
      if (causal) sees = sees.tril();
      for (const Path path : kPaths) {
        const BlockAttention attention{
            .q_BHNbD = blocks.to_blocks(in.q_BHLD, 2),
            .keys = {neighbouring_keys(blocks, in.k_BHSD, in.v_BHSD, 1, causal ? 0 : 1, causal)},
            .noise = {},
            .relative = in.relative,
            .sink_H = in.sink_H};
        ASSERT_EQ(choose_path(attention, path), path);
        expect_same(blocks.from_blocks(attend_in_blocks(attention, path), 2),
                    attend_pairs(in, sees), in, causal ? "causal" : "encoder");
      }
    }
  }
}

// Windows of gathered rows; their order in a segment decides no distance.
TEST(LogitTerms, GatheredRowsAreTheDefinition) {
  constexpr std::int64_t kTokens = 90;
  const at::Tensor order = at::randperm(kTokens).to(at::kInt).view({1, 1, -1}),
                   end = at::full({1, 1, 1}, kTokens, at::kInt);
  for (const bool causal : {false, true}) {
    for (const SlotMerge merge : {SlotMerge::kOneSoftmax, SlotMerge::kMean}) {
      const Operands in = operands(kTokens, -7, causal ? 8 : 15, causal);
      const RowLists all = make_row_lists(order, end, kTokens);
      const at::Tensor distance_LS = at::arange(kTokens).unsqueeze(1) - at::arange(kTokens);
      const at::Tensor sees = at::logical_and(distance_LS >= (causal ? 0 : -20), distance_LS <= 20);
      for (const Path path : kPaths) {
        const GatheredAttention attention{
            .q_BHLD = in.q_BHLD,
            .k_BHSD = in.k_BHSD,
            .v_BHSD = in.v_BHSD,
            .rows = {all, all, {.least = causal ? 0 : -20, .most = 20}},
            .merge = merge,
            .relative = in.relative,
            .sink_H = in.sink_H};
        ASSERT_EQ(choose_path(attention, path), path);
        expect_same(attend_gathered(attention, path).out_BHLD, attend_pairs(in, sees), in,
                    causal ? "causal" : "encoder");
      }
    }
  }
}

// Eight query heads take no more memory with one key head than with eight.
TEST(LogitTerms, KeysAreNotCopiedToQueryHeads) {
  constexpr std::int64_t kTokens = 512;
  const auto bytes_of = [&](std::int64_t key_heads, bool gathered) {
    const auto tensor = [&](std::int64_t heads) { return at::ones({1, heads, kTokens, 32}); };
    const at::Tensor q = tensor(8), k = tensor(key_heads), v = tensor(key_heads);
    const GatheredRows rows = sliding_window_lists(kTokens, 64, true, at::kCPU);
    const Blocks blocks(q, TokenMasks{}, 64, true);
    const CountedBytes bytes;
    if (gathered) {
      attend_gathered({.q_BHLD = q, .k_BHSD = k, .v_BHSD = v, .rows = rows}, Path::kFused);
    } else {
      attend_in_blocks({.q_BHNbD = blocks.to_blocks(q, 2),
                        .keys = {neighbouring_keys(blocks, k, v, 1, 0, true)},
                        .noise = {}},
                       Path::kFused);
    }
    return bytes.total();
  };
  for (const bool gathered : {false, true}) {
    EXPECT_LE(bytes_of(1, gathered), bytes_of(8, gathered)) << "gathered " << gathered;
  }
}

// The bytes that one part of a mechanism's work takes: a forward pass, its backward pass, or the
// decoding of the last token.
enum class Part { kForward, kBackward, kDecoding };
std::size_t bytes_of(const configs::Mechanism& config, std::int64_t key_heads, Part part) {
  constexpr std::int64_t kTokens = 128;
  const Built built(config,
                    {.channels = 8,
                     .heads = 8,
                     .key_heads = key_heads,
                     .head_dim = 32,
                     .sequence_length = kTokens,
                     .causal = true},
                    at::kFloat);
  AttentionInput in;
  in.q_BHLD = random_tensor({1, 8, kTokens, 32}, at::kFloat, 1).set_requires_grad(true);
  in.k_BHSD = random_tensor({1, key_heads, kTokens, 32}, at::kFloat, 2).set_requires_grad(true);
  in.v_BHSD = random_tensor({1, key_heads, kTokens, 32}, at::kFloat, 3).set_requires_grad(true);
  in.x_q_BLC = in.x_kv_BSC = random_tensor({1, kTokens, 8}, at::kFloat, 4);
  if (part == Part::kDecoding) {
    at::NoGradGuard no_grad;
    const auto state = built.mechanism->decode_state(1);
    for (std::int64_t t = 0; t + 1 < kTokens; ++t) {
      built.mechanism->decode_step(*state, token_slice(in, t, 1));
    }
    const AttentionInput last = token_slice(in, kTokens - 1, 1);
    const CountedBytes bytes;
    built.mechanism->decode_step(*state, last);
    return bytes.total();
  }
  const CountedBytes forward;
  const at::Tensor out = run(*built.mechanism, in, Path::kFused);
  if (part == Part::kForward) return forward.total();
  const std::size_t before = forward.total();
  torch::autograd::grad({out.sum()}, {in.q_BHLD, in.k_BHSD, in.v_BHSD}, {},
                        /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                        /*allow_unused=*/true);  // values that are keys
  return forward.total() - before;
}

TEST(LogitTerms, MechanismsDoNotCopyKeysToQueryHeads) {
  const std::string terms = "sink: true relative_positions { max_distance: 8 }";
  for (const std::string& text :
       {std::string("dense {}"), std::string("dense {} sink: true"),
        "block_local { block: 32 look_back: 1 } " + terms, "sliding_window { width: 64 } " + terms,
        "sinkhorn { block: 32 } " + terms, "sinkhorn { block: 32 top_m: 1 } " + terms,
        "sinkhorn { block: 32 tie_key_value: true } " + terms, "moba { block: 32 } " + terms,
        "routing { clusters: 4 share_query_key: false } " + terms}) {
    configs::Mechanism config;
    ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config));
    for (const Part part : {Part::kForward, Part::kBackward, Part::kDecoding}) {
      // LibTorch's operations compute dense attention with a sink, and the unit vectors of grouped
      // queries, of which the clusters of their key head need the means.
      if ((config.has_dense() || config.has_routing()) && part != Part::kDecoding) continue;
      const std::size_t without_groups = bytes_of(config, 8, part);
      for (const std::int64_t key_heads : {1, 2}) {
        EXPECT_LE(bytes_of(config, key_heads, part), without_groups)
            << text << ", " << key_heads << " key heads, part " << static_cast<int>(part);
      }
    }
  }
}

class LogitTermsMergedAs : public ::testing::TestWithParam<SlotMerge> {};
INSTANTIATE_TEST_SUITE_P(Merges, LogitTermsMergedAs,
                         ::testing::Values(SlotMerge::kOneSoftmax, SlotMerge::kMean));

TEST_P(LogitTermsMergedAs, Fp64EqualsTheReference) {
  for (int seed = 0; seed < kProblems; ++seed) {
    GatheredProblem problem = random_problem_with_terms(seed).to(at::kDouble);
    problem.attention.merge = GetParam();
    const auto reference = solve(problem, Path::kReference), fused = solve(problem, Path::kFused);
    for (std::size_t i = 0; i < reference.size(); ++i) {
      const double scale = std::max(1.0, reference[i].abs().max().item<double>());
      EXPECT_LE(max_difference(fused[i], reference[i]), 1e-11 * scale)
          << problem.name << " result " << i;
    }
  }
}

TEST_P(LogitTermsMergedAs, ErrorsAreThoseOfTheReference) {
  int checked = 0;
  for (int seed = 0; seed < kProblems; seed += 4) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      checked += expect_errors_of_the_reference(
          seed, dtype, 1000, dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-23,
          [](const GatheredProblem& problem) { return solve(problem, Path::kFused); }, GetParam(),
          random_problem_with_terms);
    }
  }
  EXPECT_GT(checked, 20);
}

TEST_P(LogitTermsMergedAs, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (int seed = 0; seed < kProblems; seed += 5) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      GatheredProblem problem = random_problem_with_terms(seed).to(dtype);
      problem.attention.merge = GetParam();
      at::set_num_threads(1);
      const auto one = solve(problem, Path::kFused);
      for (const int more : {2, 3}) {
        at::set_num_threads(more);
        const auto other = solve(problem, Path::kFused);
        for (std::size_t i = 0; i < one.size(); ++i) {
          EXPECT_TRUE(at::equal(one[i], other[i])) << problem.name << " threads " << more;
        }
      }
    }
  }
  at::set_num_threads(threads);
}

// Mechanisms with three query heads for each of two key heads.
class GroupedQueries : public ::testing::TestWithParam<MechanismCase> {
 protected:
  static MechanismShape shape(std::int64_t heads, std::int64_t key_heads) {
    return {.channels = 5,
            .heads = heads,
            .key_heads = key_heads,
            .head_dim = 3,
            .sequence_length = 32,
            .causal = GetParam().causal};
  }
  static AttentionInput input(const Built& built) {
    AttentionInput in = random_input(kTokens, at::kDouble, 1, built.traits);
    in.q_BHLD = random_tensor({2, 6, kTokens, 3}, at::kDouble, 9).set_requires_grad(true);
    return in;
  }
};
INSTANTIATE_TEST_SUITE_P(All, GroupedQueries,
                         ::testing::ValuesIn(cases_where([](const MechanismCase&,
                                                            const MechanismTraits& traits) {
                           return !traits.shares_query_key;
                         })),
                         test::name_of);
// They are what one mechanism per query head, with its parameters, gives on the key head. Where the
// queries of a group decide together, they are equal here.
TEST_P(GroupedQueries, AreQueriesOfCopiedKeys) {
  const Built built(GetParam().config, shape(6, 2), at::kDouble);
  AttentionInput in = input(built);
  if (built.traits.chooses_keys) {
    in.q_BHLD = in.q_BHLD.detach().slice(1, 0, 6, 3).repeat_interleave(3, 1);
  }
  for (const Path path : kPaths) {
    const at::Tensor out = run(*built.mechanism, in, path);
    for (std::int64_t h = 0; h < 6; ++h) {
      const Built one(GetParam().config, shape(1, 1), at::kDouble);
      at::NoGradGuard no_grad;
      for (std::size_t s = 0; s < one.parameters.statistics().size(); ++s) {
        at::Tensor of_one = one.parameters.statistics()[s].value;
        of_one.copy_(built.parameters.statistics()[s].value.narrow(0, h / 3, 1));
      }
      for (std::size_t p = 0; p < one.parameters.list().size(); ++p) {
        const at::Tensor of_all = built.parameters.list()[p].value;
        at::Tensor of_one = one.parameters.list()[p].value;
        const std::int64_t rows = of_all.size(0) / of_one.size(0);
        const std::int64_t row = rows == 6 ? h : rows == 2 ? h / 3 : 0;
        of_one.copy_(of_all.narrow(0, row * of_one.size(0), of_one.size(0)));
      }
      AttentionInput of_head = in;
      of_head.q_BHLD = in.q_BHLD.narrow(1, h, 1);
      of_head.k_BHSD = in.k_BHSD.narrow(1, h / 3, 1);
      of_head.v_BHSD = built.traits.ties_key_value ? of_head.k_BHSD : in.v_BHSD.narrow(1, h / 3, 1);
      EXPECT_LE(max_difference(run(*one.mechanism, of_head, path).select(1, 0), out.select(1, h)),
                1e-12);
    }
  }
}

TEST_P(GroupedQueries, PathsAndDecodingAgree) {
  const Built built(GetParam().config, shape(6, 2), at::kDouble);
  const AttentionInput in = input(built);
  const auto all = leaves(in, built.parameters);
  const at::Tensor reference = run(*built.mechanism, in, Path::kReference);
  const auto d_reference = gradients(reference, all);
  for (const Path path : {Path::kSdpa, Path::kFused}) {
    const at::Tensor out = run(*built.mechanism, in, path);
    EXPECT_LE(max_difference(out, reference), 1e-11);
    const auto d = gradients(out, all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_LE(max_difference(d[i], d_reference[i]),
                1e-11 * std::max(1.0, d_reference[i].abs().max().item<double>()))
          << "leaf " << i;
    }
  }
  if (!built.traits.exact_in_decoding) return;
  at::NoGradGuard no_grad;
  const auto state = built.mechanism->decode_state(2);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    EXPECT_LE(max_difference(built.mechanism->decode_step(*state, token_slice(in, t, 1)),
                             reference.narrow(2, t, 1)),
              1e-12)
        << t;
  }
}

}  // namespace
}  // namespace birkhoff::test
