// Trains the toy model: everything a Trainer needs, over any group.
#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <set>

#include "configs/schema/config.pb.h"
#include "data/batch/partition.h"
#include "runtime/trainer.h"
#include "tests/runtime/deliver.h"
#include "tests/runtime/toy_model.h"

namespace birkhoff::test {

inline configs::Config toy_config(std::int64_t steps) {
  configs::Config config;
  config.mutable_train()->set_steps(steps);
  config.mutable_train()->set_global_batch(12);
  config.mutable_train()->set_seed(9);
  config.mutable_train()->set_bucket_elements(60);
  config.mutable_train()->mutable_schedule()->set_learning_rate(0.02f);
  config.mutable_train()->mutable_schedule()->set_warmup_steps(3);
  config.mutable_train()->mutable_optimizer()->mutable_adamw();
  config.mutable_train()->set_clip_norm(0.25f);  // clips the first steps and not the last
  return config;
}

class ToyTraining {
 public:
  ToyTraining(const configs::Config& config, ProcessGroup& group, at::ScalarType dtype)
      : config_(config),
        model(dtype),
        group_(group),
        buckets(model.parameters(), group, config.train().bucket_elements(),
                config.train().invariant().shards(), config.train().zero_stage()),
        optimizer(make_optimizer(config.train().optimizer(), buckets)) {}

  // This rank's part of the global batch at `consumed`, as data/loader/loader.h divides it.
  Batch next_batch() {
    const std::int64_t global = config_.train().global_batch();
    if (before_batch) before_batch(consumed_ / global + 1);
    const Interval share =
        rank_share(global, config_.train().invariant().shards(), group_.rank(), group_.size());
    Batch batch = toy_batch(consumed_ + share.begin, consumed_ + share.end);
    batch.global_size = global;
    if (without_targets.contains(consumed_ / global + 1))
      batch.fields.find(field::kMask)->second.zero_();
    consumed_ += global;
    return batch;
  }

  // While run() runs: sends the signal to this process, and returns when it is noted.
  void request_stop(int signal) { deliver(*signals_, signal); }

  Outcome run(const StopSignals& signals) {
    signals_ = &signals;
    consumed_ = state.consumed;
    DevicePrefetcher feed([this] { return next_batch(); }, group_.device());
    StopRequest stop(signals);
    Reporter reporter;
    Activity activity;
    ProcessGroup& all = world == nullptr ? group_ : *world;
    RunCheckpoints none(/*writer=*/nullptr, all, {}, {}, std::nullopt, nullptr, reporter);
    Trainer trainer({config_, model, feed, group_, all, buckets, *optimizer, stop, reporter,
                     activity, checkpoints == nullptr ? none : *checkpoints, samples_per_epoch,
                     evaluator, agreement, buckets.passes_are_collective() ? &all : nullptr});
    return trainer.run(state);
  }

  // All parameters and statistics, one after another.
  at::Tensor parameters() {
    std::vector<at::Tensor> all;
    for (const auto& parameter : model.parameters().list())
      all.push_back(parameter.value.detach().flatten());
    for (const auto& statistic : model.parameters().statistics())
      all.push_back(statistic.value.flatten());
    return at::cat(all);
  }

  // Mean loss of the next steps' batches without noise: one number that depends on every parameter.
  double loss() {
    const at::NoGradGuard no_grad;
    const auto sums = model.loss_sums(toy_batch(1000, 1100), std::nullopt);
    return (sums.nats / sums.count).item<double>();
  }

 private:
  configs::Config config_;

 public:
  ToyModel model;

 private:
  const StopSignals* signals_ = nullptr;  // of run()
  ProcessGroup& group_;
  std::int64_t consumed_ = 0;

 public:
  GradBuckets buckets;
  std::unique_ptr<Optimizer> optimizer;
  ProcessGroup* world = nullptr;  // null: the group
  Evaluator* evaluator = nullptr;
  RunCheckpoints* checkpoints = nullptr;  // null: nothing is saved
  Agreement* agreement = nullptr;
  std::int64_t samples_per_epoch = 100;
  std::function<void(std::int64_t step)> before_batch;  // between two steps
  std::set<std::int64_t> without_targets;               // steps
  TrainState state;
};

}  // namespace birkhoff::test
