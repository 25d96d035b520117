// PCT against its definition in other operations, offset attention against loops in fp64; the order
// of points, gradients, ranks, and what is refused.
//
// Legend: B batch, N points, C channels.
#include "models/point_cloud_transformer/point_cloud_transformer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "cluster/base/error.h"
#include "data/batch/partition.h"
#include "models/point_cloud_transformer/point_sampling.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/models/point_cloud_transformer/point_clouds.h"

namespace birkhoff {
namespace {

// Symmetric.
at::Tensor scores_of(std::int64_t N) {
  const at::Tensor q = values_of({2, N, 3}, 7) * 1.5;
  return at::matmul(q, q.transpose(1, 2));
}

// The published code: a softmax over keys, divided by the sums over queries, and outputs that are
// sums over queries.
TEST(OffsetAttention, TwoHalfStepsArePctsWeights) {
  const at::Tensor scores = scores_of(6), softmax = at::softmax(scores, -1);
  const at::Tensor weights = softmax / softmax.sum(1, /*keepdim=*/true);
  EXPECT_LT(most_different(balanced_weights(scores, 2), weights.transpose(1, 2)), 1e-14);
  EXPECT_LT(most_different(balanced_weights(scores, 1), softmax), 1e-15);
}

// The loops of balanced() begin with rows. E is symmetric: an even number of half-steps that ends
// with rows is the transpose of one that begins with them and ends with columns.
TEST(OffsetAttention, WeightsAreThoseOfLoops) {
  const at::Tensor scores = scores_of(6);
  for (const int half_steps : {1, 2, 3, 4, 9, 20}) {
    const at::Tensor weights = balanced_weights(scores, half_steps);
    for (std::int64_t b = 0; b < 2; ++b) {
      const at::Tensor ours = half_steps % 2 == 1 ? weights[b] : weights[b].t();
      EXPECT_LT(difference(balanced(Matrix(scores[b]), half_steps), ours), 1e-13) << half_steps;
    }
    EXPECT_LT(most_different(weights.sum(2), at::ones({2, 6}, at::kDouble)), 1e-14);
  }
  // In the limit columns sum to 1, too.
  EXPECT_GT(most_different(balanced_weights(scores, 2).sum(1), at::ones({2, 6}, at::kDouble)),
            1e-3);
  EXPECT_LT(most_different(balanced_weights(scores, 400).sum(1), at::ones({2, 6}, at::kDouble)),
            1e-6);
}

// The parameters of a model by name, and the operations of the published code on them.
class Definition {
 public:
  Definition(Parameters& parameters, bool training) : training_(training) {
    for (const Parameter& p : parameters.list()) values_[p.name] = p.value;
    for (const Statistic& s : parameters.statistics()) values_[s.name] = s.value;
  }

  at::Tensor linear(const std::string& name, const at::Tensor& x) const {
    return at::matmul(x, values_.at(name + ".weight").t());
  }
  at::Tensor norm(const std::string& name, const at::Tensor& x) const {
    const at::Tensor running = values_.at(name + ".running").clone(),
                     rows = x.reshape({-1, x.size(-1)});
    return at::batch_norm(rows, values_.at(name + ".weight"), values_.at(name + ".bias"),
                          running[0], running[1], training_, 0.1, kEpsilon, false)
        .view(x.sizes());
  }
  at::Tensor layer(const std::string& name, const at::Tensor& x, double slope = 0) const {
    return at::leaky_relu(norm(name + "_norm", linear(name, x)), slope);
  }

  // x_n - x_c and x_c, side by side, for each neighbor.
  PointFeatures stage(const std::string& name, const PointFeatures& in, std::int64_t K) const {
    const std::int64_t S = in.points_BNP.size(1) / 2;
    const at::Tensor kept = farthest_points(in.points_BNP, S),
                     centers = rows_at(in.points_BNP, kept), x_c = rows_at(in.x_BNC, kept),
                     x_n = rows_at(in.x_BNC, nearest_points(in.points_BNP, centers, K));
    const at::Tensor pairs =
        at::cat({x_n - x_c.unsqueeze(2), x_c.unsqueeze(2).expand({-1, -1, K, -1})}, 3);
    return {centers, layer(name + ".second", layer(name + ".first", pairs)).amax(2)};
  }
  at::Tensor attention(const std::string& name, const at::Tensor& x) const {
    const at::Tensor q = linear(name + ".attention.query_key", x),
                     v = linear(name + ".attention.value", x);
    const at::Tensor softmax = at::softmax(at::matmul(q, q.transpose(1, 2)), -1);
    const at::Tensor weights = softmax / softmax.sum(1, /*keepdim=*/true);
    const at::Tensor x_r = at::matmul(v.transpose(1, 2), weights).transpose(1, 2);
    return x + layer(name + ".attention.output", x - x_r);
  }
  at::Tensor logits(const at::Tensor& points) const {
    const PointFeatures all = {points, layer("embedding.1", layer("embedding.0", points))};
    const at::Tensor kept = stage("stages.1", stage("stages.0", all, 4), 4).x_BNC;
    const at::Tensor x0 = layer("mix.1", layer("mix.0", kept)), x1 = attention("blocks.0", x0),
                     x2 = attention("blocks.1", x1);
    const at::Tensor pooled = layer("fuse", at::cat({kept, x1, x2}, 2), 0.2).amax(1);
    const at::Tensor hidden = layer("hidden.1", layer("hidden.0", pooled, 0.2), 0.2);
    return linear("output", hidden) + values_.at("output.bias");
  }

 private:
  bool training_;
  std::map<std::string, at::Tensor> values_;
};

// Training with dropout 0, its gradients, and evaluation.
TEST(PointCloudTransformer, IsItsDefinition) {
  const auto model = make_cloud_model({kPct + "dropout=0"});
  const Batch clouds = make_clouds(6);
  EXPECT_LT(
      most_different(
          log_probabilities_of(*model, clouds),
          at::log_softmax(
              Definition(model->parameters(), false).logits(clouds.at("points")).detach(), -1)),
      1e-11);
  const LossSums sums = model->loss_sums(clouds, make_noise(clouds));
  sums.loss.backward();
  std::map<std::string, at::Tensor> gradients;
  for (const Parameter& p : model->parameters().list()) {
    gradients[p.name] = p.value.grad().clone();
    p.value.mutable_grad() = at::Tensor();
  }
  const at::Tensor log_p =
      at::log_softmax(Definition(model->parameters(), true).logits(clouds.at("points")), -1);
  const at::Tensor loss = -log_p.gather(1, clouds.at("labels").unsqueeze(1)).sum();
  EXPECT_NEAR(sums.nats.item<double>(), loss.item<double>(), 1e-10);
  loss.backward();
  for (const Parameter& p : model->parameters().list()) {
    EXPECT_GT(p.value.grad().abs().max().item<double>(), 1e-9) << p.name;
    EXPECT_LT(most_different(gradients[p.name], p.value.grad()),
              1e-9 * (1 + p.value.grad().abs().max().item<double>()))
        << p.name;
  }
}

TEST(OffsetAttention, PermutedPointsHavePermutedOutputs) {
  for (const int half_steps : {1, 2, 7}) {
    const configs::Config config =
        cloud_config({kPct + "half_steps=" + std::to_string(half_steps)});
    Parameters parameters = make_parameters(config, at::kCPU);
    const OffsetAttention layer(config, 0, parameters);
    set_values(parameters);
    const at::Tensor x = values_of({3, 9, 8}, 2),
                     order = (at::arange(9, at::kLong) * 4 + 2).remainder(9);
    for (const bool training : {false, true}) {
      NamedSums sums;
      EXPECT_LT(most_different(layer(x.index_select(1, order), training, sums),
                               layer(x, training, sums).index_select(1, order)),
                1e-12);
    }
  }
}

// Central differences of the sum of k y, of the input and of each parameter.
TEST(OffsetAttention, GradientsAreThoseOfDifferences) {
  constexpr double kStep = 1e-6;
  for (const int half_steps : {1, 2, 5}) {
    const configs::Config config =
        cloud_config({kPct + "half_steps=" + std::to_string(half_steps)});
    Parameters parameters = make_parameters(config, at::kCPU);
    const OffsetAttention layer(config, 0, parameters);
    set_values(parameters);
    const at::Tensor x = values_of({2, 5, 8}, 2).set_requires_grad(true),
                     k = values_of({2, 5, 8}, 5);
    const auto loss = [&] {
      NamedSums sums;
      return (k * layer(x, /*training=*/true, sums)).sum();
    };
    loss().backward();
    std::vector<at::Tensor> leaves = {x};
    for (const Parameter& p : parameters.list()) leaves.push_back(p.value);
    for (const at::Tensor& leaf : leaves) {
      const at::Tensor values = leaf.detach().view(-1), gradient = leaf.grad().view(-1);
      for (std::int64_t i = 0; i < values.size(0); i += 3) {
        const double before = values[i].item<double>();
        const auto at_offset = [&](double offset) {
          values[i] = before + offset;
          const double result = loss().item<double>();
          values[i] = before;
          return result;
        };
        const double numeric = (at_offset(kStep) - at_offset(-kStep)) / (2 * kStep);
        // The error is kStep^2 of the third derivative, and 1e-16 of the loss per kStep.
        EXPECT_NEAR(numeric, gradient[i].item<double>(), 1e-6 * (1 + std::abs(numeric)));
      }
    }
  }
}

// Farthest-point sampling starts at the first point, which stays where it is.
TEST(PointCloudTransformer, TheOrderOfOtherPointsDoesNotMatter) {
  const auto model = make_cloud_model({kPct + "half_steps=5"});
  const Batch clouds = make_clouds(4);
  Batch permuted = clouds, changed = clouds;
  permuted.fields["points"] = clouds.at("points").index_select(
      1, at::cat({at::zeros({1}, at::kLong), (at::arange(15, at::kLong) * 4).remainder(15) + 1}));
  const at::Tensor all_BK = log_probabilities_of(*model, clouds);
  EXPECT_LT(most_different(log_probabilities_of(*model, permuted), all_BK), 1e-12);
  changed.fields["points"] = clouds.at("points") * 1.1;
  EXPECT_GT(most_different(log_probabilities_of(*model, changed), all_BK), 1e-4);
}

// The loss, its gradients and the statistics of 12 sets, divided over ranks, with dropout.
TEST(PointCloudTransformer, RanksTrainAsOneWithTheWholeBatch) {
  struct Pass {
    double nats = 0;
    std::map<std::string, at::Tensor> sums;  // of gradients and statistics

    void add(const Pass& other) {
      nats += other.nats;
      for (const auto& [name, value] : other.sums)
        sums[name] = sums.contains(name) ? sums[name] + value : value;
    }
  };
  const Batch clouds = make_clouds(12);
  const auto pass = [&](Interval rows, ProcessGroup* group) {
    const auto model = make_cloud_model({}, ModelPlacement(at::kCPU, nullptr, group));
    const Batch mine = clouds.narrow(rows.begin, rows.end);
    const LossSums sums = model->loss_sums(mine, make_noise(mine));
    sums.loss.backward();
    Pass result{sums.nats.item<double>(), {}};
    for (const auto& [name, value] : sums.named) result.sums[name] = value;
    for (const Parameter& p : model->parameters().list()) result.sums[p.name] = p.value.grad();
    return result;
  };
  const Pass expected = pass({0, 12}, nullptr);
  const auto whole = make_cloud_model();
  const Parameters& parameters = whole->parameters();
  EXPECT_EQ(expected.sums.size(), 1 + parameters.list().size() + parameters.statistics().size());
  for (const int ranks : {2, 4}) {
    Pass total;
    std::mutex adding;
    run_ranks(ranks, [&](ProcessGroup& group) {
      // Of 1 and 11, or 1, 2, 4 and 5 sets.
      const std::int64_t ends[] = {0, 1, ranks == 2 ? 12 : 3, 7, 12};
      const Pass mine = pass({ends[group.rank()], ends[group.rank() + 1]}, &group);
      const std::lock_guard lock(adding);
      total.add(mine);
    });
    EXPECT_NEAR(total.nats, expected.nats, 1e-10);
    ASSERT_EQ(total.sums.size(), expected.sums.size());
    for (const auto& [name, value] : expected.sums) {
      EXPECT_LT(most_different(total.sums.at(name), value),
                1e-10 * (1 + value.abs().max().item<double>()))
          << name << " on " << ranks;
    }
  }
}

TEST(PointCloudTransformer, CountsItsProducts) {
  const auto model = make_cloud_model();
  const double C = 8;
  const auto linear = [](double rows, double in, double out) { return 2 * rows * in * out; };
  const double stage_1 = linear(16, 2, 4) + linear(8, 2, 4) + linear(8 * 4, 4, 4),
               stage_2 = linear(8, 4, 8) + linear(4, 4, 8) + linear(4 * 4, 8, 8),
               layer = linear(4, C, 2) + 2 * linear(4, C, C) + 2 * 4 * 4 * (2 + C);
  EXPECT_EQ(model->forward_flops_per_sequence(),
            linear(16, 3, 2) + linear(16, 2, 2) + stage_1 + stage_2 + 2 * linear(4, C, C) +
                2 * layer + linear(4, 3 * C, 4 * C) + linear(1, 4 * C, 2 * C) +
                linear(1, 2 * C, C) + linear(1, C, 3));
}

TEST(PointCloudTransformer, RefusesWhatDoesNotFitInOneLine) {
  struct Refused {
    std::vector<std::string> settings;
    std::string message;
  };
  const std::string norms = " with batch norms, whose statistics are those of the global batch";
  const Refused cases[] = {
      {{"mesh.tensor=2"}, "mesh.tensor: must be 1 with task.point_sets"},
      {{"model.channels=6", "model.heads=1"}, "model.channels: must be a multiple of 4"},
      {{"data.sequence_length=18"}, "data.sequence_length: must be a multiple of 4"},
      {{kPct + "neighbors=9"}, "neighbors: 9 are more than the 8 points"},
      {{"model.heads=2"}, "model.heads: has no effect with point_cloud_transformer"},
      {{"model.attention.0={ group { mechanism { sinkformer {} } } }"},
       "model.attention: has no effect with point_cloud_transformer"},
      {{"train.global_batch=1"}, "train.global_batch: must be at least 2" + norms},
      {{"train.micro_batch=4"}, "train.micro_batch: must be 0" + norms},
      {{"train.invariant.shards=4"}, "train.invariant.shards: must be 0" + norms},
      {{"train.recompute=true"}, "train.recompute: must be false" + norms},
      {{"device=cuda", "train.precision=fp32", "train.cuda_graph=true"},
       "train.cuda_graph: must be false" + norms},
  };
  for (const Refused& refused : cases) {
    try {
      cloud_config(refused.settings);
      ADD_FAILURE() << refused.message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_THAT(error.what(), testing::HasSubstr(refused.message));
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace birkhoff
