// The share of dense attention that clusters hold, against the attention matrices themselves.
// Legend: B batch, H heads, L tokens, D head dim.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using Routing = configs::RoutingAttention;
constexpr std::int64_t kMatrixLength = 17;

configs::Mechanism measured(int clusters, int window, Routing::CausalSelection selection,
                            bool share) {
  configs::Mechanism config;
  auto& message = *config.mutable_routing();
  message.set_clusters(clusters);
  message.set_window(window);
  message.set_causal_selection(selection);
  message.set_share_query_key(share);
  message.set_measure_dense_mass(true);
  return config;
}

double figure(const Mechanism& mechanism, const AttentionInput& in, Path path) {
  double mass = NAN, queries = NAN;
  for (const auto& [name, sum] : mechanism.attend(in, path).sums) {
    if (name == "dense_mass") mass = sum.item<double>();
    if (name == "queries") queries = sum.item<double>();
  }
  return mass / queries;
}

at::Tensor unit_vectors_of(const at::Tensor& x) {
  return x / at::linalg_vector_norm(x, 2, at::IntArrayRef({-1}), true);
}

// Head dim kMatrixLength: with the identity as values, outputs are the probabilities themselves.
struct MassProblem {
  configs::Mechanism config;
  bool causal;
  std::int64_t heads, key_heads;
  Built built{config,
              {.channels = 5,
               .heads = heads,
               .key_heads = key_heads,
               .head_dim = kMatrixLength,
               .sequence_length = kMatrixLength,
               .causal = causal},
              at::kDouble};
  AttentionInput in{};

  MassProblem(const configs::Mechanism& mechanism, bool is_causal, std::int64_t query_heads,
              std::int64_t heads_of_keys)
      : config(mechanism), causal(is_causal), heads(query_heads), key_heads(heads_of_keys) {
    in.q_BHLD = random_tensor({2, heads, kMatrixLength, kMatrixLength}, at::kDouble, 1);
    in.k_BHSD = built.traits.shares_query_key
                    ? in.q_BHLD
                    : random_tensor({2, key_heads, kMatrixLength, kMatrixLength}, at::kDouble, 2);
    in.v_BHSD =
        at::eye(kMatrixLength, at::kDouble).expand({2, key_heads, kMatrixLength, kMatrixLength});
  }

  // The same in loops.
  double expected() const {
    const at::NoGradGuard no_grad;
    const at::Tensor seen_BHLL = run(*built.mechanism, in, Path::kReference) != 0;
    const bool share = built.traits.shares_query_key;
    const float given = config.routing().logit_scale();
    const double scale = given > 0 ? given : std::sqrt(static_cast<double>(kMatrixLength));
    at::Tensor table_HRD;
    for (const Parameter& parameter : built.parameters.list()) {
      if (parameter.name.ends_with(".relative_keys")) table_HRD = parameter.value;
    }
    const std::int64_t most = config.relative_positions().max_distance();
    double mass = 0, queries = 0;
    for (std::int64_t b = 0; b < 2; ++b) {
      const auto document = [&](std::int64_t i) {
        return in.segments_q_BL.defined() ? in.segments_q_BL[b][i].item<int>() : 0;
      };
      const std::int64_t length =
          in.key_lengths_B.defined() ? in.key_lengths_B[b].item<std::int64_t>() : kMatrixLength;
      for (std::int64_t h = 0; h < heads; ++h) {
        const at::Tensor u_LD = unit_vectors_of(in.q_BHLD[b][h]),
                         k_LD = unit_vectors_of(in.k_BHSD[b][h / (heads / key_heads)]);
        const at::Tensor cosines_LL = at::matmul(u_LD, k_LD.t());
        for (std::int64_t i = 0; i < length; ++i) {
          const bool begins = i == 0 || document(i) != document(i - 1);
          at::Tensor logits_L =
              at::full({kMatrixLength}, -std::numeric_limits<double>::infinity(), at::kDouble);
          for (std::int64_t j = 0; j < length; ++j) {
            if (document(j) != document(i) || (causal && j > i)) continue;
            if (causal && share && j == i && !begins) continue;
            double logit = scale * cosines_LL[i][j].item<double>();
            if (table_HRD.defined()) {
              const std::int64_t r =
                  std::clamp(j - i + most, std::int64_t{0}, table_HRD.size(1) - 1);
              // Queries have the length sqrt(scale sqrt(D)), and logits are divided by sqrt(D).
              const double factor =
                  std::sqrt(scale / std::sqrt(static_cast<double>(kMatrixLength)));
              logit +=
                  factor * u_LD[i].dot(table_HRD[table_HRD.size(0) == 1 ? 0 : h][r]).item<double>();
            }
            logits_L[j] = logit;
          }
          mass += logits_L.softmax(0)
                      .masked_fill(seen_BHLL[b][h][i].logical_not(), 0)
                      .sum()
                      .item<double>();
          ++queries;
        }
      }
    }
    return mass / queries;
  }
};

TEST(DenseMass, IsTheShareOfTheDenseMatrix) {
  int partial = 0;
  for (const auto selection : {Routing::causal_bucket, Routing::full_topw, Routing::prefix_topw}) {
    for (const bool causal : {true, false}) {
      if (!causal && selection != Routing::full_topw) continue;
      for (const bool share : {true, false}) {
        for (const int masks : {0, 1, 2, 3}) {
          configs::Mechanism config = measured(3, 5, selection, share);
          // Terms: relative positions and a sink, a logit scale, grouped queries.
          const std::int64_t key_heads = masks == 1 && !share ? 1 : 2;
          if (masks == 2) config.mutable_routing()->set_logit_scale(7);
          if (masks == 3) {
            config.mutable_relative_positions()->set_max_distance(4);
            config.mutable_relative_positions()->set_values(false);
            config.set_sink(true);
          }
          MassProblem problem(config, causal, 2, key_heads);
          if (masks & 1) problem.in.key_lengths_B = at::tensor({17, 12}, at::kLong);
          if (masks & 2) {
            const at::Tensor token_L = at::arange(kMatrixLength);
            problem.in.segments_q_BL = problem.in.segments_kv_BS =
                at::stack({token_L >= 6, token_L >= 15}).to(at::kInt);
          }
          const double expected = problem.expected();
          for (const Path path : {Path::kReference, Path::kFused}) {
            EXPECT_NEAR(figure(*problem.built.mechanism, problem.in, path), expected, 1e-12)
                << config.ShortDebugString() << " causal " << causal << " masks " << masks;
          }
          partial += expected > 0.1 && expected < 0.9;
        }
      }
    }
  }
  EXPECT_GT(partial, 20);
}

// One cluster of all tokens is dense attention; here of more than one chunk of queries.
TEST(DenseMass, OneClusterHoldsAll) {
  constexpr int kLong = 2300;
  for (const bool causal : {false, true}) {
    for (const bool share : {false, true}) {
      const Built built(measured(1, kLong, Routing::causal_bucket, share), causal, at::kFloat,
                        kLong);
      AttentionInput in = random_input(kLong, at::kFloat, 2, built.traits);
      const at::NoGradGuard no_grad;
      for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD}) *x = x->narrow(0, 0, 1);
      EXPECT_NEAR(figure(*built.mechanism, in, Path::kFused), 1, 1e-6)
          << "causal " << causal << " shared " << share;
    }
  }
}

TEST(DenseMass, IsReportedOnRequestOnly) {
  configs::Mechanism config = measured(3, 5, Routing::causal_bucket, true);
  const auto reports = [&] {
    const Built built(config, true, at::kFloat);
    for (const Figure& each : built.traits.figures) {
      if (each.sum == "dense_mass") return true;
    }
    return false;
  };
  EXPECT_TRUE(reports());
  config.mutable_routing()->set_measure_dense_mass(false);
  EXPECT_FALSE(reports());
}

}  // namespace
}  // namespace birkhoff::test
