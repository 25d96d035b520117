// Sinkhorn attention against explicit formulas, and the special cases of it and of other
// mechanisms. Legend: B batch, H heads, L tokens, N blocks, b tokens of a block, D head dim, C
// channels.
#include "attention/mechanisms/sinkhorn/sinkhorn.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "attention/mechanism.h"
#include "cluster/base/error.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using configs::SinkhornAttention;

configs::Mechanism sinkhorn_config(int block = kBlock) {
  configs::Mechanism config;
  config.mutable_sinkhorn()->set_block(block);
  return config;
}

configs::Mechanism dense_config() {
  configs::Mechanism config;
  config.mutable_dense();
  return config;
}

void set_parameter(const Built& built, const std::string& name, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  for (const Parameter& parameter : built.parameters.list()) {
    if (parameter.name != name) continue;
    at::Tensor target = parameter.value;
    target.copy_(value.expand_as(target));
    return;
  }
  FAIL() << "no parameter " << name;
}

void set_all_parameters(const Built& built, double value) {
  at::NoGradGuard no_grad;
  for (const Parameter& parameter : built.parameters.list()) parameter.value.fill_(value);
}

// softmax(Q [K_s; K]^T / sqrt(D)) [V_s; V] of an encoder, for the given block weights [B, H, N, N].
at::Tensor concat_attention(const AttentionInput& in, const at::Tensor& weights_BHNN) {
  const std::int64_t N = weights_BHNN.size(2);
  const auto to_blocks = [&](const at::Tensor& x) { return x.unflatten(2, {N, -1}); };
  const auto sorted = [&](const at::Tensor& x) {
    return at::einsum("bhuv,bhvsd->bhusd", {weights_BHNN, to_blocks(x)});
  };
  const at::Tensor k = at::cat({sorted(in.k_BHSD), to_blocks(in.k_BHSD)}, 3);
  const at::Tensor v = at::cat({sorted(in.v_BHSD), to_blocks(in.v_BHSD)}, 3);
  const at::Tensor scores = at::matmul(to_blocks(in.q_BHLD), k.transpose(-1, -2)) / std::sqrt(3.0);
  return at::matmul(scores.softmax(-1), v).flatten(2, 3);
}

// An encoder of 4 blocks whose block u scores block v as table[u][v] * temperature.
struct TableSorted {
  explicit TableSorted(const at::Tensor& table_NN, int iterations = 5)
      : built(config(iterations), false, at::kDouble, 16), in(random_input(16, at::kDouble, 1)) {
    at::NoGradGuard no_grad;
    set_all_parameters(built, 0);
    // Block u starts with the unit vector e_u, which pooling leaves unchanged.
    for (std::int64_t u = 0; u < 4; ++u) {
      in.x_q_BLC.select(1, u * kBlock).copy_(at::eye(5, at::kDouble)[u]);
    }
    set_parameter(built, "attention.sort_net.output.weight",
                  at::cat({table_NN, at::zeros({1, 4}, at::kDouble)}) * 0.75);
  }
  static configs::Mechanism config(int iterations) {
    configs::Mechanism config = sinkhorn_config();
    config.mutable_sinkhorn()->set_pooling(SinkhornAttention::first);
    config.mutable_sinkhorn()->set_iterations(iterations);
    return config;
  }
  Built built;
  AttentionInput in;
};

TEST(SinkhornAttention, PermutationScoresGatherBlocks) {
  const at::Tensor permutation_NN =
      at::eye(4, at::kDouble).index_select(0, at::tensor({2, 0, 3, 1}, at::kLong));
  const TableSorted sorted(permutation_NN * 200);
  for (const Path path : {Path::kReference, Path::kFused}) {
    EXPECT_LE(max_difference(run(*sorted.built.mechanism, sorted.in, path),
                             concat_attention(sorted.in, permutation_NN.expand({2, 2, 4, 4}))),
              1e-12);
  }
}

TEST(SinkhornAttention, ZeroScoresGiveTheMeanBlock) {
  const TableSorted sorted(at::zeros({4, 4}, at::kDouble));
  EXPECT_LE(max_difference(run(*sorted.built.mechanism, sorted.in, Path::kFused),
                           concat_attention(sorted.in, at::full({2, 2, 4, 4}, 0.25, at::kDouble))),
            1e-12);
}

TEST(SinkhornAttention, NoIterationsMixWithExponentials) {
  const at::Tensor table_NN = random_tensor({4, 4}, at::kDouble, 3);
  const TableSorted sorted(table_NN, 0);
  EXPECT_LE(max_difference(run(*sorted.built.mechanism, sorted.in, Path::kFused),
                           concat_attention(sorted.in, table_NN.exp().expand({2, 2, 4, 4}))),
            1e-12);
}

// Each row keeps its two largest weights unchanged; the sums report the dropped ones.
TEST(SinkhornAttention, TopMKeepsTheLargestWeightsAndReportsTheRest) {
  const at::Tensor table_NN = random_tensor({4, 4}, at::kDouble, 3);
  TableSorted sorted(table_NN, 0);
  configs::Mechanism config = TableSorted::config(0);
  config.mutable_sinkhorn()->set_top_m(2);
  const Built cut(config, false, at::kDouble, 16);
  set_all_parameters(cut, 0);
  set_parameter(cut, "attention.sort_net.output.weight",
                at::cat({table_NN, at::zeros({1, 4}, at::kDouble)}) * 0.75);
  const at::Tensor all_NN = table_NN.exp();
  const at::Tensor second_N1 = std::get<0>(all_NN.sort(1, true)).narrow(1, 1, 1);
  const at::Tensor kept_NN = all_NN.masked_fill(all_NN < second_N1, 0);
  for (const Path path : {Path::kReference, Path::kFused}) {
    const AttentionOutput out = cut.mechanism->attend(sorted.in, path);
    EXPECT_LE(
        max_difference(out.out_BHLD, concat_attention(sorted.in, kept_NN.expand({2, 2, 4, 4}))),
        1e-12);
    ASSERT_EQ(out.sums.size(), 2);
    EXPECT_EQ(out.sums[0].first, "block_weight");
    EXPECT_EQ(out.sums[1].first, "block_weight_dropped");
    const double all = 4 * all_NN.sum().item<double>(), kept = 4 * kept_NN.sum().item<double>();
    EXPECT_NEAR(out.sums[0].second.item<double>(), all, 1e-12 * all);
    EXPECT_NEAR(out.sums[1].second.item<double>(), all - kept, 1e-12 * all);
    EXPECT_FALSE(out.sums[1].second.requires_grad());
  }
}

// Among equal weights those of the earlier blocks stay, also token by token. A top_m of all blocks
// keeps all.
TEST(SinkhornAttention, TopMOfEqualWeightsIsTheEarlierBlocks) {
  configs::Mechanism config = sinkhorn_config();
  config.mutable_sinkhorn()->set_causal_balance(SinkhornAttention::uniform);
  const AttentionInput in = random_input(24, at::kDouble, 1);
  const auto reached = [&](int top_m) {
    config.mutable_sinkhorn()->set_top_m(top_m);
    const Built built(config, true, at::kDouble);
    const at::Tensor out = run(*built.mechanism, in, Path::kFused);
    const at::Tensor d = gradients(out.select(2, 23), {in.v_BHSD})[0];
    return d.abs().sum({0, 1, 3}).view({6, kBlock}).sum(1) > 0;
  };
  EXPECT_TRUE(at::equal(reached(1), at::tensor({1, 0, 0, 0, 0, 1}).to(at::kBool)));
  EXPECT_TRUE(at::equal(reached(2), at::tensor({1, 1, 0, 0, 0, 1}).to(at::kBool)));
  EXPECT_TRUE(reached(0).all().item<bool>());
  EXPECT_TRUE(reached(6).all().item<bool>());
}

// With few sources of many blocks, kernels gather blocks instead of multiplying all of them. A
// single source is read where it lies.
TEST(SinkhornAttention, GatheredSourcesEqualTheReference) {
  for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
    const bool causal = variant & 1;
    for (const bool padded : {false, true}) {
      configs::Mechanism config = sinkhorn_config();
      config.mutable_sinkhorn()->set_top_m(variant & 2 ? 1 : 2);
      if (variant & 4) config.mutable_sinkhorn()->set_combine(SinkhornAttention::add_outputs);
      const Built built(config, causal, at::kDouble, 64);
      AttentionInput in = random_input(64, at::kDouble, 1);
      if (padded) in.key_lengths_B = at::tensor({64, 49}, at::kLong);
      const auto all = leaves(in, built.parameters);
      const at::Tensor reference = run(*built.mechanism, in, Path::kReference),
                       fused = run(*built.mechanism, in, Path::kFused);
      EXPECT_LE(max_difference(fused, reference), 1e-12);
      const auto d_reference = gradients(reference, all), d_fused = gradients(fused, all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_LE(max_difference(d_fused[i], d_reference[i]),
                  1e-11 * std::max(1.0, d_reference[i].abs().max().item<double>()))
            << "leaf " << i << " variant " << variant << " padded " << padded;
      }
    }
  }
}

TEST(SinkhornAttention, OneBlockIsDenseAttention) {
  const AttentionInput in = random_input(8, at::kDouble, 1);
  const at::Tensor dense =
      run(*Built(dense_config(), false, at::kDouble).mechanism, in, Path::kReference);
  configs::Mechanism config = sinkhorn_config(8);
  const auto sinkhorn = [&](bool causal) {
    return run(*Built(config, causal, at::kDouble, 8).mechanism, in, Path::kFused);
  };
  EXPECT_LE(max_difference(sinkhorn(false), dense), 1e-13);
  config.mutable_sinkhorn()->set_combine(SinkhornAttention::add_outputs);
  EXPECT_LE(max_difference(sinkhorn(false), 2 * dense), 1e-13);
  const at::Tensor causal_dense =
      run(*Built(dense_config(), true, at::kDouble).mechanism, in, Path::kReference);
  for (const auto combine :
       {SinkhornAttention::concat, SinkhornAttention::add_outputs, SinkhornAttention::add_logits}) {
    config.mutable_sinkhorn()->set_combine(combine);
    EXPECT_LE(max_difference(sinkhorn(true), causal_dense), 1e-13);
  }
}

// Two softmaxes, each of which gives a constant value back; the first block has no sorted one.
TEST(SinkhornAttention, AddedOutputsOfConstantValuesAreTheirNumber) {
  configs::Mechanism config = sinkhorn_config();
  config.mutable_sinkhorn()->set_combine(SinkhornAttention::add_outputs);
  AttentionInput in = random_input(14, at::kDouble, 1);
  in.v_BHSD = at::ones_like(in.v_BHSD);
  for (const bool causal : {false, true}) {
    const Built built(config, causal, at::kDouble);
    at::Tensor expected = at::full_like(in.v_BHSD, 2);
    if (causal) expected.narrow(2, 0, kBlock).fill_(1);
    for (const Path path : {Path::kReference, Path::kFused}) {
      EXPECT_LE(max_difference(run(*built.mechanism, in, path), expected), 1e-12);
    }
  }
}

TEST(BlockLocal, OneBlockIsDenseAttention) {
  const AttentionInput in = random_input(8, at::kDouble, 1);
  configs::Mechanism config;
  config.mutable_block_local()->set_block(8);
  for (const bool causal : {false, true}) {
    EXPECT_LE(max_difference(
                  run(*Built(config, causal, at::kDouble).mechanism, in, Path::kFused),
                  run(*Built(dense_config(), causal, at::kDouble).mechanism, in, Path::kReference)),
              1e-13);
  }
}

TEST(BlockLocal, TwoBlocksWithLookBackAreDenseAttention) {
  const AttentionInput in = random_input(8, at::kDouble, 1);
  configs::Mechanism config;
  config.mutable_block_local()->set_block(4);
  config.mutable_block_local()->set_look_back(1);
  for (const bool causal : {false, true}) {
    EXPECT_LE(max_difference(
                  run(*Built(config, causal, at::kDouble).mechanism, in, Path::kFused),
                  run(*Built(dense_config(), causal, at::kDouble).mechanism, in, Path::kReference)),
              1e-13);
  }
}

TEST(SinkhornMixture, IsTheSumOfItsParts) {
  const AttentionInput in = random_input(14, at::kDouble, 1);
  configs::Mechanism mixture;
  *mixture.mutable_sinkhorn_mixture()->mutable_sinkhorn() = sinkhorn_config().sinkhorn();
  const auto out = [&](const configs::Mechanism& config) {
    return run(*Built(config, true, at::kDouble).mechanism, in, Path::kFused);
  };
  EXPECT_LE(max_difference(out(mixture), out(sinkhorn_config()) + out(dense_config())), 1e-13);
}

TEST(SinkhornAttention, UniformIsTheMeanOfPastBlocks) {
  configs::Mechanism config = sinkhorn_config();
  config.mutable_sinkhorn()->set_causal_balance(SinkhornAttention::uniform);
  const Built built(config, true, at::kDouble);
  const AttentionInput in = random_input(12, at::kDouble, 1);
  const auto block = [](const at::Tensor& x, std::int64_t u) {
    return x.narrow(2, u * kBlock, kBlock);
  };
  // The last token sees all of its block.
  const at::Tensor k =
      at::cat({(block(in.k_BHSD, 0) + block(in.k_BHSD, 1)) / 2, block(in.k_BHSD, 2)}, 2);
  const at::Tensor v =
      at::cat({(block(in.v_BHSD, 0) + block(in.v_BHSD, 1)) / 2, block(in.v_BHSD, 2)}, 2);
  const at::Tensor q = in.q_BHLD.narrow(2, 11, 1);
  const at::Tensor expected =
      at::matmul((at::matmul(q, k.transpose(2, 3)) / std::sqrt(3.0)).softmax(-1), v);
  EXPECT_LE(max_difference(run(*built.mechanism, in, Path::kFused).narrow(2, 11, 1), expected),
            1e-13);
}

// The published balance leaks from the future, and traits() says so.
TEST(SinkhornAttention, PaperMaskedLeaks) {
  for (const int iterations : {1, 2, 5}) {
    configs::Mechanism config = sinkhorn_config();
    config.mutable_sinkhorn()->set_causal_balance(SinkhornAttention::paper_masked);
    config.mutable_sinkhorn()->set_iterations(iterations);
    const Built built(config, true, at::kDouble);
    EXPECT_FALSE(built.traits.leak.empty());
    EXPECT_FALSE(built.traits.causal);
    EXPECT_FALSE(built.traits.exact_in_decoding);
    const AttentionInput in = random_input(16, at::kDouble, 1);
    const at::Tensor out = run(*built.mechanism, in, Path::kFused);
    const at::Tensor changed = run(*built.mechanism, replace_tokens(in, 12, 16, 9), Path::kFused);
    EXPECT_GT(max_difference(out.narrow(2, 4, 8), changed.narrow(2, 4, 8)), 1e-3);
    // Only the block weights leak: with the layer's input unchanged there is no leak.
    AttentionInput keys_changed = replace_tokens(in, 12, 16, 9);
    keys_changed.x_q_BLC = keys_changed.x_kv_BSC = in.x_q_BLC;
    EXPECT_LE(max_difference(out.narrow(2, 0, 12),
                             run(*built.mechanism, keys_changed, Path::kFused).narrow(2, 0, 12)),
              1e-14);
  }
}

// Documents packed at block borders give the same results as on their own.
TEST(SinkhornAttention, PackedDocumentEqualsDocumentAlone) {
  for (const bool causal : {false, true}) {
    for (const auto pooling : {SinkhornAttention::sum, SinkhornAttention::mean,
                               SinkhornAttention::cumulative_mean, SinkhornAttention::first}) {
      configs::Mechanism config = sinkhorn_config();
      config.mutable_sinkhorn()->set_sort_net(SinkhornAttention::attention);  // no positions
      config.mutable_sinkhorn()->set_pooling(pooling);
      const Built built(config, causal, at::kDouble);
      AttentionInput in = random_input(24, at::kDouble, 1);
      const AttentionInput alone = token_slice(in, 8, 16);
      in.segments_q_BL = in.segments_kv_BS =
          (at::arange(24) >= 8).to(at::kInt).expand({2, 24}).contiguous();
      EXPECT_LE(max_difference(run(*built.mechanism, in, Path::kFused).narrow(2, 8, 16),
                               run(*built.mechanism, alone, Path::kFused)),
                1e-11);
    }
  }
}

// A document that starts inside a block: its first sorted source is its first whole block.
TEST(SinkhornAttention, SourcesLieWhollyInTheDocument) {
  configs::Mechanism config = sinkhorn_config();
  config.mutable_sinkhorn()->set_causal_balance(SinkhornAttention::uniform);
  const Built built(config, true, at::kDouble);
  AttentionInput in = random_input(16, at::kDouble, 1);
  in.segments_q_BL = in.segments_kv_BS =
      (at::arange(16) >= 6).to(at::kInt).expand({2, 16}).contiguous();
  const auto reached = [&](std::int64_t query) {
    const auto d = gradients(run(*built.mechanism, in, Path::kFused).select(2, query), {in.v_BHSD});
    std::vector<std::int64_t> tokens;
    for (std::int64_t j = 0; j < 16; ++j) {
      if (d[0].select(2, j).abs().max().item<double>() > 0) tokens.push_back(j);
    }
    return tokens;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(reached(5), ElementsAre(0, 1, 2, 3, 4, 5));  // its block began in its document
  EXPECT_THAT(reached(7), ElementsAre(6, 7));              // block 1 began in the other document
  EXPECT_THAT(reached(9), ElementsAre(8, 9));              // block 1 spans two documents
  EXPECT_THAT(reached(13), ElementsAre(8, 9, 10, 11, 12, 13));
}

TEST(SinkhornAttention, TiedValuesAreKeys) {
  configs::Mechanism config = sinkhorn_config();
  const Built untied(config, true, at::kDouble);
  config.mutable_sinkhorn()->set_tie_key_value(true);
  const Built tied(config, true, at::kDouble);
  EXPECT_TRUE(tied.traits.ties_key_value);
  AttentionInput in = random_input(14, at::kDouble, 1, tied.traits);
  AttentionInput copied = in;
  copied.v_BHSD = in.k_BHSD.detach().clone().set_requires_grad(true);
  const at::Tensor tied_out = run(*tied.mechanism, in, Path::kFused);
  const at::Tensor out = run(*untied.mechanism, copied, Path::kFused);
  EXPECT_LE(max_difference(tied_out, out), 1e-14);
  const auto d = gradients(out, {copied.k_BHSD, copied.v_BHSD});
  EXPECT_LE(max_difference(gradients(tied_out, {in.k_BHSD})[0], d[0] + d[1]), 1e-13);
}

TEST(Factory, RefusesBadValuesByName) {
  const auto message = [](const configs::Mechanism& config, std::int64_t sequence_length = 32) {
    try {
      Built built(config, true, at::kFloat, sequence_length);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(message({}), HasSubstr("no attention mechanism"));
  configs::Mechanism config = sinkhorn_config(0);
  EXPECT_THAT(message(config), HasSubstr("sinkhorn.block: must be in [1, 1048576], is 0"));
  config = sinkhorn_config();
  config.mutable_sinkhorn()->set_temperature(0);
  EXPECT_THAT(message(config), HasSubstr("sinkhorn.temperature: must be in (0, 1000000], is 0"));
  config = sinkhorn_config();
  config.mutable_sinkhorn()->set_top_m(-1);
  EXPECT_THAT(message(config), HasSubstr("sinkhorn.top_m: must be in [0, 1048576], is -1"));
  config = sinkhorn_config();
  config.mutable_sinkhorn()->set_max_blocks(7);
  EXPECT_THAT(message(config), HasSubstr("32 tokens in blocks of 4 are 8 blocks"));
  EXPECT_EQ(message(config, 28), "accepted");
  config = sinkhorn_config();
  config.mutable_sinkhorn()->set_causal_balance(SinkhornAttention::paper_masked);
  config.mutable_sinkhorn()->set_sort_net(SinkhornAttention::attention);
  EXPECT_THAT(message(config), HasSubstr("paper_masked"));
  config = {};
  config.mutable_block_local()->set_look_back(2);
  EXPECT_THAT(message(config), HasSubstr("block_local.look_back: must be in [0, 1], is 2"));
  config = {};
  config.mutable_dense()->set_dropout(1);
  EXPECT_THAT(message(config), HasSubstr("dense.dropout: must be in [0, 1), is 1"));
}

// The control has nothing to learn: a SortNet would get only weight decay, no gradient.
TEST(SinkhornAttention, UniformHasNoSortNetUnlessItIsAnEncoder) {
  configs::Mechanism config = sinkhorn_config();
  config.mutable_sinkhorn()->set_causal_balance(SinkhornAttention::uniform);
  EXPECT_TRUE(Built(config, true, at::kFloat).parameters.list().empty());
  EXPECT_EQ(Built(config, false, at::kFloat).parameters.list().size(), 2);
}

TEST(SinkhornAttention, FlopsCountIterationsWhereThereAreAny) {
  const auto flops = [](SinkhornAttention::CausalBalance balance, int iterations) {
    configs::Mechanism config = sinkhorn_config();
    config.mutable_sinkhorn()->set_causal_balance(balance);
    config.mutable_sinkhorn()->set_iterations(iterations);
    return Built(config, true, at::kFloat).mechanism->forward_flops(32);
  };
  constexpr double kBlocks = 8, kHeads = 2, kChannels = 5;
  // Two steps per iteration, and five operations per pair in each step.
  EXPECT_DOUBLE_EQ(flops(SinkhornAttention::prefix, 3) - flops(SinkhornAttention::prefix, 0),
                   3 * 2 * 5 * kHeads * kBlocks * kBlocks * kBlocks / 3);
  for (const auto balance : {SinkhornAttention::cumulative, SinkhornAttention::paper_masked}) {
    EXPECT_DOUBLE_EQ(flops(balance, 3) - flops(balance, 0),
                     3 * 2 * 5 * kHeads * kBlocks * (kBlocks - 1) / 2);
  }
  EXPECT_EQ(flops(SinkhornAttention::none, 3), flops(SinkhornAttention::none, 0));
  EXPECT_EQ(flops(SinkhornAttention::uniform, 3), flops(SinkhornAttention::uniform, 0));
  // Without iterations the modes differ only by the SortNet.
  EXPECT_EQ(flops(SinkhornAttention::none, 3), flops(SinkhornAttention::prefix, 0));
  EXPECT_EQ(flops(SinkhornAttention::none, 3) - flops(SinkhornAttention::uniform, 3),
            2 * kHeads * kBlocks * kBlocks * kChannels);
}

// The noise of a pair of blocks and a head does not depend on the number of blocks.
TEST(SortNet, NoiseOfAnEntryDoesNotDependOnTheLength) {
  for (const auto variant : {SinkhornAttention::linear, SinkhornAttention::attention}) {
    SinkhornAttention config = sinkhorn_config().sinkhorn();
    config.set_sort_net(variant);
    config.set_gumbel_noise(true);
    Parameters parameters(3, at::kDouble);
    const SortNet sort_net(
        config, {.channels = 5, .heads = 2, .head_dim = 3, .sequence_length = 32, .causal = true},
        "sort_net", parameters);
    const NoiseKey key{.seed = 5,
                       .step = at::full({1}, 3, at::kLong),
                       .layer = 2,
                       .sample_ids_B = at::tensor({41, 97}, at::kLong)};
    const at::Tensor psi_BNC = random_tensor({2, 8, 5}, at::kDouble, 1);
    const at::Tensor whole_BHNN = sort_net.scores(psi_BNC, psi_BNC, key);
    EXPECT_GT(max_difference(whole_BHNN, sort_net.scores(psi_BNC, psi_BNC, {})), 1);
    for (const std::int64_t blocks : {1, 3, 7}) {
      const at::Tensor part_BNC = psi_BNC.narrow(1, 0, blocks);
      EXPECT_LE(max_difference(sort_net.scores(part_BNC, part_BNC, key),
                               whole_BHNN.narrow(2, 0, blocks).narrow(3, 0, blocks)),
                1e-12)
          << blocks << " blocks";
    }
  }
}

// Whatever padding holds, features are sums of existing tokens, and gradients are finite.
TEST(SortNet, PoolingDoesNotReadPadding) {
  AttentionInput in = random_input(14, at::kDouble, 1);
  in.key_lengths_B = at::tensor({9, 0}, at::kLong);
  at::Tensor x_BLC = in.x_q_BLC.detach().clone();
  x_BLC[0].narrow(0, 9, 5).fill_(std::nan(""));
  x_BLC[1].fill_(std::nan(""));
  x_BLC.requires_grad_(true);
  SinkhornAttention config;
  for (const Path path : {Path::kReference, Path::kFused}) {
    for (const bool causal : {false, true}) {
      const Blocks blocks = token_blocks(in, kBlock, causal);
      std::vector<at::Tensor> features{pool_sources(blocks, x_BLC, path)};
      for (const auto pooling : {SinkhornAttention::sum, SinkhornAttention::mean,
                                 SinkhornAttention::cumulative_mean, SinkhornAttention::first}) {
        config.set_pooling(pooling);
        features.push_back(pool_destinations(config, causal, blocks, x_BLC, {}, path));
      }
      // The third block has one token: on its own, or after eight others if sums are cumulative.
      EXPECT_LE(max_difference(features[0][0][2], x_BLC[0][8]), 1e-15);
      EXPECT_LE(
          max_difference(features[1][0][2], causal ? x_BLC[0].narrow(0, 0, 9).sum(0) : x_BLC[0][8]),
          1e-14);
      EXPECT_LE(max_difference(features[4][0][2], x_BLC[0][8]), 0);
      for (const at::Tensor& feature_BNC : features) {
        EXPECT_TRUE(feature_BNC.isfinite().all().item<bool>());
        EXPECT_TRUE(gradients(feature_BNC, {x_BLC})[0].isfinite().all().item<bool>());
      }
    }
  }
}

TEST(SortNet, RefusesMoreBlocksThanItScores) {
  const Built built(sinkhorn_config(), true, at::kFloat, 16);
  EXPECT_THROW(run(*built.mechanism, random_input(17, at::kFloat, 1), Path::kFused), Error);
}

}  // namespace
}  // namespace birkhoff::test
