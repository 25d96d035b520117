#include "tests/runtime/mesh/mesh_training.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "models/parallel/parameter_use.h"
#include "tests/models/placed_tensor.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kVocabulary = 11;

}  // namespace

configs::Config mesh_config(const std::vector<std::string>& settings) {
  return parse_config(R"(
      task { language_model {} }
      data { corpus: 'none' sequence_length: 8 }
      model {
        layers: 2 channels: 16 heads: 8 bias: true
        attention { group { heads: 4 mechanism { sinkhorn { block: 4 gumbel_noise: true } } }
                    group { heads: 4 mechanism { routing { clusters: 2 dropout: 0.2 } } } }
        dropout { residual: 0.2 }
      }
      train {
        precision: fp64 global_batch: 8 steps: 3 seed: 4 bucket_elements: 500 clip_norm: 0.5
        schedule { shape: constant warmup_steps: 1 learning_rate: 0.01 }
      })",
                      "test", settings);
}

Batch mesh_batch(const configs::Config& config, Interval rows) {
  const std::int64_t tokens = config.data().sequence_length();
  const at::Tensor ids =
      at::arange(rows.begin * tokens, rows.end * tokens, at::kLong).view({rows.size(), tokens});
  Batch batch;
  batch.sample_ids_B = at::arange(rows.begin, rows.end, at::kLong);
  batch.global_size = config.train().global_batch();
  batch.fields["inputs"] = (ids * 7 + ids.div(5, "floor")).remainder(kVocabulary);
  if (config.task().has_classification()) {
    batch.fields["lengths"] = tokens - batch.sample_ids_B.remainder(tokens);
    batch.fields["labels"] = batch.sample_ids_B.remainder(3);
    return batch;
  }
  batch.fields["targets"] = (ids * 3 + 1).remainder(kVocabulary);
  batch.fields["mask"] = at::ones_like(ids, at::kByte);
  return batch;
}

MeshTraining::MeshTraining(configs::Config of_run, const MeshRank& of_mesh)
    : config(std::move(of_run)),
      rank(of_mesh),
      model(make_task(config)->make_model(
          {.vocabulary = kVocabulary, .class_names = {"a", "b", "c"}}, {at::kCPU, &rank.tensor})),
      buckets(model->parameters(), rank.data, config.train().bucket_elements(),
              config.train().invariant().shards(), config.train().zero_stage()),
      optimizer(make_optimizer(config.train().optimizer(), buckets)),
      step(config.train(), *model, rank.data, rank.world, buckets, *optimizer, nullptr,
           pass_group()) {}

Batch MeshTraining::batch(std::int64_t number) const {
  const std::int64_t size = config.train().global_batch();
  const Interval mine =
      rank_share(size, config.train().invariant().shards(), rank.data.rank(), rank.data.size());
  return mesh_batch(config, {number * size + mine.begin, number * size + mine.end});
}

GradientSums MeshTraining::run(std::int64_t number, const StepHooks& hooks) {
  const GradientSums sums = step.sum_gradients(batch(number), number, 1, hooks);
  if (!sums.abandoned) step.update(sums, number, /*epoch=*/0, 1);
  return sums;
}

namespace {

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

}  // namespace

void expect_steps_of_one_rank(const std::vector<Axes>& meshes,
                              const std::vector<std::string>& settings) {
  std::vector<GradientSums> expected;
  std::map<std::string, at::Tensor> values;
  run_mesh(1, 1, [&](const MeshRank& rank) {
    MeshTraining training(mesh_config(settings), rank);
    for (int step = 1; step <= 3; ++step) expected.push_back(training.run(step));
    for (const Parameter& p : training.model->parameters().list()) {
      values[p.name] = p.value.detach().clone();
    }
    for (const Statistic& s : training.model->parameters().statistics()) {
      values[s.name] = s.value.clone();
    }
  });
  EXPECT_GT(expected[0].norm, mesh_config(settings).train().clip_norm());
  for (const Axes axes : meshes) {
    SCOPED_TRACE(testing::Message() << axes.data << " x " << axes.tensor);
    run_mesh(axes.data, axes.tensor, [&](const MeshRank& rank) {
      MeshTraining training(mesh_config(settings), rank);
      for (const GradientSums& sums : expected) {
        const GradientSums mine = training.run(1 + (&sums - expected.data()));
        EXPECT_EQ(mine.count, sums.count);
        EXPECT_EQ(mine.num_tokens, sums.num_tokens);
        EXPECT_NEAR(mine.nats, sums.nats, 1e-10 * sums.nats);
        EXPECT_NEAR(mine.norm, sums.norm, 1e-10 * sums.norm);
        ASSERT_EQ(mine.figures.size(), sums.figures.size());
        for (std::size_t i = 0; i < sums.figures.size(); ++i) {
          EXPECT_EQ(mine.figures[i].first, sums.figures[i].first);
          EXPECT_NEAR(mine.figures[i].second, sums.figures[i].second, 1e-10);
        }
      }
      for (const Parameter& p : training.model->parameters().list()) {
        const ParameterUse use(training.model->parameters(), {p.unit});
        EXPECT_LE(largest_difference(p.value, part_of(values.at(p.name), p.placement)), 1e-10)
            << p.name;
      }
      for (const Statistic& s : training.model->parameters().statistics()) {
        EXPECT_LE(largest_difference(s.value, part_of(values.at(s.name), s.placement)), 1e-10)
            << s.name;
      }
    });
  }
}

}  // namespace birkhoff
