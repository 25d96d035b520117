// Routing attention against loops over its definition, and its metrics against values computed by
// hand.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "attention/mechanisms/routing/centroids.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using Routing = configs::RoutingAttention;

configs::Mechanism routing(int clusters, int window, Routing::CausalSelection selection,
                           bool share = false, Routing::Overlap overlap = Routing::mean) {
  configs::Mechanism config;
  auto& message = *config.mutable_routing();
  message.set_clusters(clusters);
  message.set_window(window);
  message.set_causal_selection(selection);
  message.set_share_query_key(share);
  message.set_overlap(overlap);
  return config;
}

at::Tensor centroids_of(const Built& built) {
  return built.parameters.statistics().at(0).value.narrow(2, 0, 3);
}

at::Tensor unit(const at::Tensor& x) {
  return x / at::linalg_vector_norm(x, 2, at::IntArrayRef({-1}), true);
}

// The definition in loops, for one head of one sample: x are unit vectors [L, 3].
struct Definition {
  const Routing& config;
  bool causal;
  at::Tensor q, k, v, centroids;
  at::Tensor q_scores = at::matmul(q, centroids.t()), k_scores = at::matmul(k, centroids.t());
  int L = static_cast<int>(q.size(0)), K = config.clusters(), w = config.window();
  double scale = config.logit_scale() > 0 ? config.logit_scale() : std::sqrt(3.0);

  double score(const at::Tensor& scores, int token, int c) const {
    return scores.const_data_ptr<double>()[token * K + c];
  }
  int nearest(const at::Tensor& scores, int token) const {
    int best = 0;
    for (int c = 1; c < K; ++c) {
      if (score(scores, token, c) > score(scores, token, best)) best = c;
    }
    return best;
  }
  // The w tokens before `end` with the highest scores.
  std::set<int> top(const at::Tensor& scores, int c, int end) const {
    std::vector<int> order(static_cast<std::size_t>(end));
    for (int i = 0; i < end; ++i) order[static_cast<std::size_t>(i)] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int i, int j) { return score(scores, i, c) > score(scores, j, c); });
    order.resize(static_cast<std::size_t>(std::min(w, end)));
    return {order.begin(), order.end()};
  }

  // The keys that query i sees in each of its clusters.
  std::vector<std::vector<int>> keys_of(int i) const {
    std::vector<std::vector<int>> keys;
    const auto selection = causal ? config.causal_selection() : Routing::full_topw;
    if (selection == Routing::causal_bucket) {
      auto& seen = keys.emplace_back();
      for (int j = 0; j <= i; ++j) {
        if (nearest(k_scores, j) == nearest(q_scores, i)) seen.push_back(j);
      }
      if (static_cast<int>(seen.size()) > w) seen.erase(seen.begin(), seen.end() - w);
    } else {
      const int end = selection == Routing::prefix_topw ? i + 1 : L;
      for (int c = 0; c < K; ++c) {
        if (!top(q_scores, c, end).contains(i)) continue;
        auto& seen = keys.emplace_back();
        for (const int j : top(k_scores, c, end)) {
          if (!causal || j <= i) seen.push_back(j);
        }
      }
    }
    if (!config.share_query_key() || !causal) return keys;
    bool sees_others = false;
    for (const auto& seen : keys) {
      for (const int j : seen) sees_others |= j != i;
    }
    for (auto& seen : keys) {
      if (sees_others) std::erase(seen, i);
    }
    return keys;
  }

  at::Tensor attend(int i, const std::vector<int>& keys) const {
    const at::Tensor index = at::tensor(std::vector<std::int64_t>(keys.begin(), keys.end()));
    const at::Tensor p = (at::mv(k.index_select(0, index), q[i]) * scale).softmax(0);
    return at::mv(v.index_select(0, index).t(), p);
  }
  // From keys_of(i).
  at::Tensor out(int i, const std::vector<std::vector<int>>& all) const {
    std::vector<int> together;
    at::Tensor sum = at::zeros({3}, at::kDouble);
    int clusters = 0;
    for (const auto& keys : all) {
      if (keys.empty()) continue;
      together.insert(together.end(), keys.begin(), keys.end());
      sum = sum + attend(i, keys);
      ++clusters;
    }
    if (clusters == 0) return sum;
    return config.overlap() == Routing::mean ? sum / clusters : attend(i, together);
  }
};

// Covers every selection, overlap and sharing. Tokens are in no cluster, in one or in several; some
// see only themselves.
TEST(Routing, IsItsDefinition) {
  int none = 0, several = 0;
  for (const auto selection : {Routing::causal_bucket, Routing::full_topw, Routing::prefix_topw}) {
    for (const bool share : {false, true}) {
      for (const auto overlap : {Routing::mean, Routing::one_softmax}) {
        for (const bool causal : {false, true}) {
          for (const auto& [clusters, window, scale] :
               {std::tuple(4, 3, 0.0), {3, 7, 2.0}, {1, 30, 5.0}, {5, 1, 1.0}}) {
            configs::Mechanism config = routing(clusters, window, selection, share, overlap);
            config.mutable_routing()->set_logit_scale(static_cast<float>(scale));
            const Built built(config, causal, at::kDouble);
            const AttentionInput in = random_input(17, at::kDouble, 3, built.traits);
            at::NoGradGuard no_grad;
            const at::Tensor reference = run(*built.mechanism, in, Path::kReference),
                             fused = run(*built.mechanism, in, Path::kFused);
            for (int b = 0; b < 2; ++b) {
              const int h = 1 - b;
              const Definition definition{config.routing(),      causal,
                                          unit(in.q_BHLD)[b][h], unit(in.k_BHSD)[b][h],
                                          in.v_BHSD[b][h],       centroids_of(built)[h]};
              for (int i = 0; i < 17; ++i) {
                const auto keys = definition.keys_of(i);
                const at::Tensor expected = definition.out(i, keys);
                for (const at::Tensor& out : {reference, fused}) {
                  ASSERT_LE(max_difference(out[b][h][i], expected), 1e-12)
                      << config.ShortDebugString() << " causal " << causal << " query " << i;
                }
                none += keys.empty();
                several += keys.size() > 1;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(none, 100);
  EXPECT_GT(several, 100);
}

// One cluster of all tokens is dense attention on the same unit vectors.
TEST(Routing, OneClusterIsDenseAttention) {
  for (const bool causal : {false, true}) {
    const Built built(routing(1, 200, Routing::causal_bucket), causal, at::kDouble,
                      /*sequence_length=*/200);
    const AttentionInput in = random_input(150, at::kDouble, 2);
    at::Tensor logits =
        at::matmul(unit(in.q_BHLD), unit(in.k_BHSD).transpose(2, 3)) * std::sqrt(3.0);
    if (causal) {
      logits = logits.masked_fill(at::ones({150, 150}, at::kBool).triu(1), -INFINITY);
    }
    const at::Tensor expected = at::matmul(logits.softmax(-1), in.v_BHSD);
    const std::vector<at::Tensor> all{in.q_BHLD, in.k_BHSD, in.v_BHSD};
    const auto d_expected = gradients(expected, all);
    for (const Path path : {Path::kReference, Path::kFused}) {
      const at::Tensor out = run(*built.mechanism, in, path);
      EXPECT_LE(max_difference(out, expected), 1e-12);
      const auto d = gradients(out, all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_LE(max_difference(d[i], d_expected[i]), 1e-12);
      }
    }
  }
}

// full_topw lets later tokens change earlier outputs, as its warning says. The other selections do
// not, with the first centroids and with updated ones (before: CausalConformance).
TEST(Routing, OnlyFullTopwLeaks) {
  for (const auto selection : {Routing::causal_bucket, Routing::full_topw, Routing::prefix_topw}) {
    for (const bool share : {false, true}) {
      const Built built(routing(4, 8, selection, share), true, at::kDouble);
      const Statistic& centroids = built.parameters.statistics().at(0);
      for (int update = 0; update < 2; ++update) {
        AttentionInput in = random_input(32, at::kDouble, 1, built.traits);
        at::NoGradGuard no_grad;
        for (const Path path : {Path::kReference, Path::kFused}) {
          const at::Tensor out = run(*built.mechanism, in, path);
          double change = 0;
          for (std::int64_t t = 1; t < 32; ++t) {
            const at::Tensor changed = run(*built.mechanism, replace_tokens(in, t, 32, 50), path);
            change = std::max(change, max_difference(changed.narrow(2, 0, t), out.narrow(2, 0, t)));
          }
          EXPECT_EQ(change > 1e-3, !built.traits.leak.empty());
          if (built.traits.leak.empty()) {
            EXPECT_LE(change, path == Path::kReference ? 1e-14 : 0);
          }
        }
        EXPECT_EQ(built.traits.leak.empty(), selection != Routing::full_topw);
        in.noise = NoiseKey{
            .step = at::zeros({1}, at::kLong), .sample_ids_B = at::arange(2), .global_batch = 2};
        for (const auto& [name, sums] : built.mechanism->attend(in, Path::kFused).sums) {
          if (name != "centroids") continue;
          at::Tensor value = centroids.value;
          value.copy_(centroids.update(value, 1000 * sums));
        }
      }
    }
  }
}

// Decoding with full_topw is prefix_topw.
TEST(Routing, DecodingSelectsOfThePrefix) {
  for (const bool share : {false, true}) {
    const Built leaky(routing(4, 3, Routing::full_topw, share), true, at::kDouble),
        honest(routing(4, 3, Routing::prefix_topw, share), true, at::kDouble);
    const AttentionInput in = random_input(20, at::kDouble, 6, leaky.traits);
    at::NoGradGuard no_grad;
    const at::Tensor expected = run(*honest.mechanism, in, Path::kFused);
    const auto state = leaky.mechanism->decode_state(2);
    for (std::int64_t t = 0; t < 20; ++t) {
      const at::Tensor step = leaky.mechanism->decode_step(*state, token_slice(in, t, 1));
      EXPECT_LE(max_difference(step, expected.narrow(2, t, 1)), 1e-12);
    }
  }
}

AttentionInput training_input(const Built& built, std::int64_t step) {
  AttentionInput in = random_input(16, at::kDouble, 4, built.traits);
  in.noise = NoiseKey{.seed = 3,
                      .step = at::full({1}, step, at::kLong),
                      .layer = 2,
                      .sample_ids_B = at::tensor({40, 41}, at::kLong),
                      .global_batch = 2};
  return in;
}

at::Tensor named(const NamedSums& sums, const std::string& name) {
  for (const auto& [sum, value] : sums) {
    if (sum == name) return value;
  }
  ADD_FAILURE() << "no sum " << name;
  return {};
}

// A cluster without tokens for reseed_after steps becomes a token of the global batch, the same one
// however the batch is cut into parts.
TEST(Centroids, DeadOnesBecomeATokenOfTheGlobalBatch) {
  for (const bool share : {false, true}) {
    configs::Mechanism config = routing(6, 4, Routing::causal_bucket, share);
    config.mutable_routing()->set_reseed_after(2);
    const Built built(config, true, at::kDouble);
    const Statistic& statistic = built.parameters.statistics().at(0);
    at::Tensor value = statistic.value;
    std::set<std::pair<int, int>> chosen;  // sample, token
    for (std::int64_t step = 0; step < 20; ++step) {
      const AttentionInput in = training_input(built, step);
      const at::Tensor sums = named(built.mechanism->attend(in, Path::kFused).sums, "centroids");
      at::Tensor of_parts = at::zeros_like(sums);
      for (const std::int64_t b : {0, 1}) {
        of_parts +=
            named(built.mechanism->attend(batch_slice(in, b, 1), Path::kFused).sums, "centroids");
      }
      EXPECT_LE(max_difference(sums, of_parts), 1e-13);
      // Each seed is one token of one sample.
      const at::Tensor seeds = sums.narrow(2, 4, 3), keys = unit(in.k_BHSD.detach());
      for (int h = 0; h < 2; ++h) {
        for (int c = 0; c < 6; ++c) {
          int found = 0;
          for (int b = 0; b < 2; ++b) {
            for (int t = 0; t < 16; ++t) {
              if (max_difference(keys[b][h][t], seeds[h][c]) > 1e-12) continue;
              ++found;
              chosen.insert({b, t});
            }
          }
          EXPECT_EQ(found, 1);
        }
      }
      // Cluster 1 of head 0 has had no token for one step, cluster 2 for none.
      value[0].select(1, 8).copy_(at::tensor({0., 1., 0., 0., 0., 0.}));
      at::Tensor without = sums.clone();
      without[0][1].narrow(0, 0, 4).fill_(0);
      without[0][2].narrow(0, 0, 4).fill_(0);
      const at::Tensor next = statistic.update(value, without);
      const at::Tensor unit_seed = seeds[0][1] / at::linalg_vector_norm(seeds[0][1]);
      EXPECT_LE(max_difference(next[0][1].narrow(0, 0, 3), unit_seed), 1e-15);
      EXPECT_TRUE(at::equal(next[0][1].narrow(0, 6, 3), at::tensor({1., 1., 0.})));
      EXPECT_TRUE(at::equal(next[0][2].narrow(0, 0, 3), value[0][2].narrow(0, 0, 3)));
      EXPECT_EQ(next[0][2][8].item<double>(), 1);
    }
    EXPECT_GT(chosen.size(), 20u);
  }
}

// d (commitment loss) / d x of unit vectors x is 2 commitment (x - centroid) / (H D).
TEST(Routing, CommitmentPullsTokensToTheirCentroids) {
  for (const bool share : {false, true}) {
    for (const Path path : {Path::kReference, Path::kFused}) {
      configs::Mechanism config = routing(4, 4, Routing::causal_bucket, share);
      config.mutable_routing()->set_commitment(0.5f);
      const Built built(config, true, at::kDouble);
      AttentionInput in = random_input(16, at::kDouble, 9, built.traits);
      in.key_lengths_B = at::tensor({16, 11}, at::kLong);
      const at::Tensor loss = named(built.mechanism->attend(in, path).sums, "auxiliary_loss").sum();
      at::Tensor expected = at::zeros({}, at::kDouble);
      std::vector<at::Tensor> inputs{in.q_BHLD};
      if (!share) inputs.push_back(in.k_BHSD);
      for (const at::Tensor& x : inputs) {
        const at::Tensor u = unit(x), centroids = centroids_of(built);
        const at::Tensor cluster =
            at::matmul(u.detach(), centroids.transpose(1, 2)).argmax(3, /*keepdim=*/true);
        const at::Tensor nearest =
            centroids.unsqueeze(0).expand({2, 2, 4, 3}).gather(2, cluster.expand_as(u));
        const at::Tensor valid =
            at::arange(16).view({1, 1, 16, 1}) < in.key_lengths_B.view({2, 1, 1, 1});
        expected = expected + (u - nearest).square().masked_fill(valid.logical_not(), 0).sum();
      }
      expected = expected * 0.5 / (2 * 3);
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
      const auto d = gradients(loss, inputs), d_expected = gradients(expected, inputs);
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_LE(max_difference(d[i], d_expected[i]), 1e-13);
      }
      EXPECT_FALSE(built.parameters.statistics().at(0).value.requires_grad());
    }
  }
}

// 33 tokens, and 20 without padding, in two dimensions. The last update exchanged the first two
// centroids.
TEST(Routing, FiguresByHand) {
  for (const bool share : {false, true}) {
    for (const Path path : {Path::kReference, Path::kFused}) {
      const Built built(
          routing(3, 4, Routing::causal_bucket, share),
          {.channels = 5, .heads = 1, .head_dim = 2, .sequence_length = 33, .causal = true},
          at::kDouble);
      built.parameters.statistics().at(0).value.copy_(at::tensor({1.,  0., 0.,  1., 1., 1., 0.,  //
                                                                  0.,  1., 1.,  0., 1., 1., 2.,  //
                                                                  -1., 0., -1., 0., 1., 1., 0.})
                                                          .view({1, 3, 7}));
      AttentionInput in;
      in.q_BHLD = at::zeros({2, 1, 33, 2}, at::kDouble);
      in.key_lengths_B = at::tensor({33, 20}, at::kLong);
      const auto set = [&](int sample, int begin, int end, double x, double y) {
        in.q_BHLD[sample][0].narrow(0, begin, end - begin).copy_(at::tensor({x, y}));
      };
      // Of tokens 0, 16 and 32 the second keeps its cluster: 27, 5 and 1 tokens.
      set(0, 0, 33, 3, 0);
      set(0, 1, 5, 0, 2);
      set(0, 16, 17, -1, 0);
      set(0, 32, 33, 0, 1);
      // Of tokens 0 and 16 the first keeps its cluster: 1, 3 and 16 tokens.
      set(1, 0, 33, -4, 0);
      set(1, 16, 17, 1, 0);
      set(1, 17, 20, 0, 1);
      in.v_BHSD = in.k_BHSD = in.q_BHLD;
      if (!share) {  // all in the second cluster, in which all were in the first
        in.k_BHSD = at::zeros_like(in.q_BHLD);
        in.k_BHSD.select(3, 1).fill_(1);
      }
      const NamedSums sums = built.mechanism->attend(in, path).sums;
      const auto sum = [&](const char* name) { return named(sums, name).item<double>(); };
      EXPECT_EQ(sum("moved_tokens"), share ? 3 : 3 + 5);
      EXPECT_EQ(sum("compared_tokens"), share ? 5 : 5 + 5);
      EXPECT_EQ(sum("largest_cluster"), share ? 27 + 16 : 27 + 16 + 33 + 20);
      EXPECT_EQ(sum("tokens"), share ? 53 : 53 + 53);
      EXPECT_EQ(sum("dead_clusters") / sum("clusters"), 1. / 3);
      std::set<std::pair<std::string, std::string>> ratios;
      for (const Figure& figure : built.traits.figures) ratios.emplace(figure.sum, figure.per);
      for (const auto& ratio : {std::pair("moved_tokens", "compared_tokens"),
                                {"largest_cluster", "tokens"},
                                {"dead_clusters", "clusters"}}) {
        EXPECT_TRUE(ratios.contains(ratio)) << ratio.first;
      }
    }
  }
}

// Even if centroids had gradients, neither outputs nor the commitment loss would give them one.
TEST(Routing, CommitmentMovesNoCentroid) {
  for (const auto selection : {Routing::causal_bucket, Routing::full_topw, Routing::prefix_topw}) {
    for (const Path path : {Path::kReference, Path::kFused}) {
      configs::Mechanism config = routing(4, 4, selection, /*share=*/false);
      config.mutable_routing()->set_commitment(0.5f);
      const Built built(config, true, at::kDouble);
      at::Tensor value = built.parameters.statistics().at(0).value;
      value.set_requires_grad(true);
      const AttentionInput in = random_input(16, at::kDouble, 9, built.traits);
      const AttentionOutput output = built.mechanism->attend(in, path);
      for (const at::Tensor& x :
           {named(output.sums, "auxiliary_loss").sum(), output.out_BHLD.sum()}) {
        const auto d = torch::autograd::grad({x}, {in.q_BHLD, value}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/false, /*allow_unused=*/true);
        EXPECT_GT(d[0].abs().max().item<double>(), 0);
        EXPECT_FALSE(d[1].defined());
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
