// SortCut against its definition. Legend: B batch, H heads, L queries, S keys, N blocks of keys, n
// shared blocks, b tokens of a block, D head dim, C channels.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "cluster/base/error.h"
#include "tests/attention/counted_bytes.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

configs::Mechanism sortcut(int blocks, bool local = false) {
  configs::Mechanism config;
  config.mutable_sortcut()->set_blocks(blocks);
  config.mutable_sortcut()->set_local(local);
  config.mutable_sortcut()->mutable_sinkhorn()->set_block(kBlock);
  return config;
}

// Queries of one input, keys and values of another.
AttentionInput cross_input(std::int64_t num_queries, std::int64_t num_keys) {
  AttentionInput in = random_input(num_keys, at::kDouble, 1);
  const AttentionInput queries = random_input(num_queries, at::kDouble, 2);
  in.q_BHLD = queries.q_BHLD;
  in.x_q_BLC = queries.x_q_BLC;
  return in;
}

at::Tensor softmax_attention(const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                             const at::Tensor& v_BHSD, const at::Tensor& weight_BHS = {}) {
  at::Tensor e = (at::matmul(q_BHLD, k_BHSD.transpose(2, 3)) / std::sqrt(3.0)).exp();
  if (weight_BHS.defined()) e = e * weight_BHS.unsqueeze(2);
  return at::matmul(e / e.sum(-1, /*keepdim=*/true), v_BHSD);
}

at::Tensor parameter_value(const Built& built, const std::string& name) {
  for (const Parameter& each : built.parameters.list()) {
    if (each.name == name) return each.value;
  }
  throw std::invalid_argument(name);
}

// Keys are a set: with every block shared, any order of whole blocks is dense attention.
TEST(SortCut, AnyPermutationOfAllBlocksIsDenseAttention) {
  for (const auto& [num_queries, num_keys] : {std::pair(16, 16), {9, 16}, {1, 16}, {40, 16}}) {
    const AttentionInput in = cross_input(num_queries, num_keys);
    const Blocks blocks(in.k_BHSD, {}, kBlock, /*causal=*/false);
    const auto all = leaves(in, Parameters(1, at::kDouble));
    const at::Tensor expected = softmax_attention(in.q_BHLD, in.k_BHSD, in.v_BHSD);
    const auto d_expected = gradients(expected, all);
    for (const auto& order : {std::vector<std::int64_t>{0, 1, 2, 3}, {2, 0, 3, 1}}) {
      const at::Tensor permutation_NN =
          at::eye(4, at::kDouble).index_select(0, at::tensor(order, at::kLong));
      for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
        const BlockAttention attention =
            shared_blocks_attention(blocks, {.weights_BHnN = permutation_NN.expand({2, 2, 4, 4})},
                                    in.q_BHLD, in.k_BHSD, in.v_BHSD, path);
        const at::Tensor out =
            attend_in_blocks(attention, path).flatten(2, 3).narrow(2, 0, num_queries);
        EXPECT_LE(max_difference(out, expected), 1e-14);
        const auto d = gradients(out, all);
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_LE(max_difference(d[i], d_expected[i]), 1e-13) << "leaf " << i;
        }
      }
    }
  }
}

// The weights of an encoder's whole blocks, from the SortNet's parameters: linear, pooling first.
at::Tensor weights_of(const Built& built, const at::Tensor& x_BSC) {
  const at::Tensor psi_BNC = x_BSC.unflatten(1, {-1, kBlock}).select(2, 0);
  const at::Tensor scores_BHNM =
      at::einsum("bnc,hcm->bhnm",
                 {psi_BNC, parameter_value(built, "attention.sort_net.output.weight")}) +
      parameter_value(built, "attention.sort_net.output.bias").unsqueeze(1);
  at::Tensor p = (scores_BHNM / 0.75).exp();
  for (int i = 0; i < 5; ++i) {
    p = p / p.sum(2, /*keepdim=*/true);
    p = p / p.sum(3, /*keepdim=*/true);
  }
  return p;
}

TEST(SortCut, IsItsDefinition) {
  for (const bool local : {false, true}) {
    // One of nine blocks is mixed where its sources lie, other mixes are matrix products.
    for (const auto& [num_queries, num_keys, blocks] : {std::tuple(16, 16, 1),
                                                        {16, 16, 2},
                                                        {16, 16, 3},
                                                        {16, 16, 9},
                                                        {5, 16, 2},
                                                        {90, 16, 3},
                                                        {36, 36, 1},
                                                        {7, 36, 1}}) {
      if (local && num_queries != num_keys) continue;
      SCOPED_TRACE(std::to_string(num_queries) + " queries, " + std::to_string(num_keys) +
                   " keys, blocks " + std::to_string(blocks) + (local ? ", local" : ""));
      const Built built(sortcut(blocks, local), false, at::kDouble, num_keys);
      AttentionInput in = cross_input(num_queries, num_keys);
      const std::int64_t N = num_keys / kBlock;
      if (local) in.x_q_BLC = in.x_kv_BSC;
      const at::Tensor first_BHnN =
          weights_of(built, in.x_kv_BSC).narrow(2, 0, std::min<std::int64_t>(blocks, N));
      const auto sorted = [&](const at::Tensor& x_BHSD) {
        return at::einsum("bhuv,bhvsd->bhusd", {first_BHnN, x_BHSD.unflatten(2, {N, -1})})
            .flatten(2, 3);
      };
      const at::Tensor k = sorted(in.k_BHSD), v = sorted(in.v_BHSD);
      at::Tensor expected;
      if (local) {
        std::vector<at::Tensor> blocks_of_queries;
        for (std::int64_t n = 0; n < N; ++n) {
          const auto own = [&](const at::Tensor& x) { return x.narrow(2, n * kBlock, kBlock); };
          blocks_of_queries.push_back(softmax_attention(
              own(in.q_BHLD), at::cat({k, own(in.k_BHSD)}, 2), at::cat({v, own(in.v_BHSD)}, 2)));
        }
        expected = at::cat(blocks_of_queries, 2);
      } else {
        expected = softmax_attention(in.q_BHLD, k, v);
      }
      const auto all = leaves(in, built.parameters);
      const auto d_expected = gradients(expected, all);
      // Rows of the weights that are not used to mix get gradients through the balance.
      const at::Tensor d_x = gradients(expected, {in.x_kv_BSC})[0];
      EXPECT_GT(d_x.select(1, 3 * kBlock).abs().max().item<double>(), 1e-6);
      for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
        const at::Tensor out = run(*built.mechanism, in, path);
        EXPECT_LE(max_difference(out, expected), 1e-12);
        const auto d = gradients(out, all);
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_LE(max_difference(d[i], d_expected[i]), 1e-11) << "leaf " << i;
        }
        EXPECT_LE(max_difference(gradients(out, {in.x_kv_BSC})[0], d_x), 1e-11);
      }
    }
  }
}

// A sorted key of which a share w is on existing tokens counts w times, and is the mean of these.
TEST(SortCut, PaddingTakesItsShareOfAKey) {
  const Built built(sortcut(2), false, at::kDouble, 16);
  AttentionInput in = cross_input(7, 16);
  const at::Tensor weights_BHnN = weights_of(built, in.x_kv_BSC).narrow(2, 0, 2);
  in.key_lengths_B = at::tensor({14, 14}, at::kLong);  // all four blocks exist
  const at::Tensor valid_NbD = at::arange(16).lt(14).view({4, kBlock, 1}).to(at::kDouble);
  const at::Tensor share_BHnb = at::einsum("bhuv,vsd->bhus", {weights_BHnN, valid_NbD});
  const auto sorted = [&](const at::Tensor& x_BHSD) {
    return (at::einsum("bhuv,bhvsd->bhusd",
                       {weights_BHnN, x_BHSD.unflatten(2, {4, -1}) * valid_NbD}) /
            share_BHnb.unsqueeze(4))
        .flatten(2, 3);
  };
  const at::Tensor expected =
      softmax_attention(in.q_BHLD, sorted(in.k_BHSD), sorted(in.v_BHSD), share_BHnb.flatten(2, 3));
  EXPECT_LT(share_BHnb.min().item<double>(), 0.9);
  for (const Path path : {Path::kReference, Path::kFused}) {
    EXPECT_LE(max_difference(run(*built.mechanism, in, path), expected), 1e-12);
  }
}

// Keys per query do not depend on the length, nor does the memory of a query.
TEST(SortCut, CostGrowsWithTheLength) {
  const auto flops_of = [](int blocks, bool local) {
    return Built(sortcut(blocks, local), false, at::kFloat, 64).mechanism->forward_flops(64);
  };
  // Queries times keys, and the mixes: 4 L n b D + 4 n L D for 2 heads of 3 channels.
  EXPECT_EQ(flops_of(3, false) - flops_of(2, false), 4.0 * 64 * kBlock * 6 + 4 * 64 * 6);
  EXPECT_EQ(flops_of(2, true) - flops_of(2, false), 4.0 * 64 * kBlock * 6);
  const auto bytes_of = [](std::int64_t num_queries) {
    const Built built(sortcut(2), false, at::kFloat, 16);
    AttentionInput in = cross_input(num_queries, 16);
    for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.x_kv_BSC}) {
      *x = x->detach().to(at::kFloat).requires_grad_(true);
    }
    const CountedBytes bytes;
    gradients(run(*built.mechanism, in, Path::kFused), {in.q_BHLD, in.k_BHSD, in.v_BHSD});
    return static_cast<double>(bytes.total());
  };
  EXPECT_LE(bytes_of(2048), 2.1 * bytes_of(1024));
}

TEST(SortCut, RefusesWhatItCannotDo) {
  const auto refused = [](const std::function<void(configs::SinkhornAttention&)>& change) {
    configs::Mechanism config = sortcut(2);
    change(*config.mutable_sortcut()->mutable_sinkhorn());
    try {
      Built(config, false, at::kFloat);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refused([](auto& c) { c.set_combine(configs::SinkhornAttention::add_outputs); }),
              ::testing::StartsWith("sortcut.sinkhorn.combine: "));
  EXPECT_THAT(refused([](auto& c) { c.set_top_m(2); }),
              ::testing::StartsWith("sortcut.sinkhorn.top_m: "));
  try {
    const Built built(sortcut(2), /*causal=*/true, at::kFloat);
    FAIL() << "a decoder was accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("sortcut: is for encoders"));
  }
}

}  // namespace
}  // namespace birkhoff::test
