#include "runtime/trainer.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "runtime/tasks/targets.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

using test::sum_named;
using test::toy_batch;
using test::toy_config;
using test::ToyModel;
using test::ToyTraining;

double largest_relative_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

TEST(Trainer, LearnsAndCountsWhatItConsumed) {
  const StopSignals signals;
  const auto group = make_single_group();
  ToyTraining training(toy_config(40), *group, at::kFloat);
  const double before = training.loss();
  EXPECT_EQ(training.run(signals), Outcome::kDone);
  EXPECT_LT(training.loss(), 0.7 * before);
  EXPECT_EQ(training.state.step, 40);
  EXPECT_EQ(training.state.consumed, 480);
  double counted = 0;
  for (std::int64_t id = 0; id < 480; ++id) {
    counted += toy_batch(id, id + 1).at(field::kMask).sum().item<double>();
  }
  EXPECT_EQ(training.state.tokens, counted);
}

// Repeats the whole step with plain autograd and torch's formulas, on the whole global batch at
// once.
TEST(Trainer, FollowsAPlainReference) {
  const StopSignals signals;
  const auto group = make_single_group();
  configs::Config config = toy_config(5);
  ToyTraining training(config, *group, at::kDouble);
  training.run(signals);

  ToyModel model(at::kDouble);
  const at::Tensor mean = model.parameters().statistics().at(0).value;
  std::vector<at::Tensor> p, m, v;
  for (const auto& parameter : model.parameters().list()) {
    p.push_back(parameter.value);
    m.push_back(at::zeros_like(p.back().detach()));
    v.push_back(at::zeros_like(p.back().detach()));
  }
  const configs::AdamW& adamw = config.train().optimizer().adamw();
  const double beta1 = adamw.beta1(), beta2 = adamw.beta2(),
               peak = config.train().schedule().learning_rate();
  for (int t = 1; t <= 5; ++t) {
    const Batch batch = toy_batch((t - 1) * 12, t * 12);
    const at::Tensor step = at::full({1}, t, at::kLong);
    const LossSums sums = model.loss_sums(batch, NoiseKey{9, step, 0, batch.sample_ids_B});
    (sums.loss / sums.count).backward();
    const at::NoGradGuard no_grad;
    double square = 0;
    for (auto& x : p) {
      if (x.grad().defined()) square += x.grad().square().sum().item<double>();
    }
    const double clip = std::min(1.0, config.train().clip_norm() / std::sqrt(square));
    if (t == 1) {
      EXPECT_LT(clip, 1) << "the test must clip";
    }
    const double rate = t <= 3 ? peak * t / 3
                               : config.train().schedule().final_learning_rate() +
                                     0.5 * (1 + std::cos(M_PI * (t - 3) / 2)) *
                                         (peak - config.train().schedule().final_learning_rate());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const at::Tensor g = p[i].grad().defined() ? p[i].grad() * clip : at::zeros_like(p[i]);
      m[i] = beta1 * m[i] + (1 - beta1) * g;
      v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      if (model.parameters().list()[i].decay)
        p[i].mul_(1 - rate * static_cast<double>(adamw.weight_decay()));
      p[i].sub_(rate * (m[i] / (1 - std::pow(beta1, t))) /
                ((v[i] / (1 - std::pow(beta2, t))).sqrt() + static_cast<double>(adamw.epsilon())));
      p[i].mutable_grad() = at::Tensor();
    }
    mean.copy_(test::RunningMean::next_mean(mean, sum_named("attention.mean", sums)));
  }
  std::vector<at::Tensor> flat;
  for (const auto& x : p) flat.push_back(x.detach().flatten());
  flat.push_back(mean.flatten());
  EXPECT_LT(largest_relative_difference(training.parameters(), at::cat(flat)), 1e-12);
}

TEST(Trainer, MicroBatchesChangeNothingButRounding) {
  const StopSignals signals;
  const auto group = make_single_group();
  ToyTraining whole(toy_config(30), *group, at::kDouble);
  whole.run(signals);
  for (const int micro_batch : {1, 5, 12, 100}) {
    configs::Config config = toy_config(30);
    config.mutable_train()->set_micro_batch(micro_batch);
    ToyTraining cut(config, *group, at::kDouble);
    cut.run(signals);
    EXPECT_LT(largest_relative_difference(cut.parameters(), whole.parameters()), 1e-11)
        << micro_batch;
    EXPECT_EQ(cut.state.tokens, whole.state.tokens);
  }
}

TEST(Trainer, AnyNumberOfRanksTrainsTheSameModel) {
  const StopSignals signals;
  const auto single = make_single_group();
  ToyTraining reference(toy_config(50), *single, at::kDouble);
  reference.run(signals);
  for (const int size : {1, 2, 3, 4, 16}) {  // 16 ranks share 12 samples: some have none
    std::vector<at::Tensor> results(static_cast<std::size_t>(size));
    run_ranks(size, [&](ProcessGroup& group) {
      ToyTraining training(toy_config(50), group, at::kDouble);
      EXPECT_EQ(training.run(signals), Outcome::kDone);
      results[static_cast<std::size_t>(group.rank())] = training.parameters();
      EXPECT_EQ(training.state.tokens, reference.state.tokens);
    });
    for (const auto& result : results) EXPECT_TRUE(at::equal(result, results[0])) << size;
    EXPECT_LT(largest_relative_difference(results[0], reference.parameters()), 1e-10) << size;
  }
}

TEST(Trainer, InterruptedAndResumedTrainingHasTheSameBits) {
  const auto group = make_single_group();
  ToyTraining whole(toy_config(20), *group, at::kFloat);
  {
    const StopSignals signals;
    whole.run(signals);
  }

  // Runs until a signal that comes in the step.
  const auto run_one_step = [](ToyTraining& training) {
    const StopSignals stop;
    training.before_batch = [&](std::int64_t) { training.request_stop(SIGUSR1); };
    return training.run(stop);
  };
  ToyTraining first(toy_config(20), *group, at::kFloat);
  EXPECT_EQ(run_one_step(first), Outcome::kRequeue);
  EXPECT_EQ(first.state.step, 1);

  const auto resume = [&](ToyTraining& from, ToyTraining& to) {
    to.state = from.state;
    auto saved = training_parts(from.model, from.buckets, *from.optimizer, 1),
         loaded = training_parts(to.model, to.buckets, *to.optimizer, 1);
    for (std::size_t i = 0; i < saved.size(); ++i) loaded[i].data.copy_(saved[i].data);
  };
  ToyTraining second(toy_config(20), *group, at::kFloat);
  resume(first, second);
  for (int step = 2; step < 20; ++step) {
    EXPECT_EQ(run_one_step(second), Outcome::kRequeue);
    ASSERT_EQ(second.state.step, step);
  }
  // A signal in the last step: nothing is left to requeue for.
  EXPECT_EQ(run_one_step(second), Outcome::kDone);
  EXPECT_TRUE(at::equal(second.parameters(), whole.parameters()));
}

TEST(Trainer, SkipsANonFiniteStepOnAllRanksAsIfItHadNeverBeen) {
  const StopSignals signals;
  for (const int size : {1, 2, 4}) {
    run_ranks(size, [&](ProcessGroup& group) {
      const auto train = [&](ToyTraining& training) {
        EXPECT_EQ(training.run(signals), Outcome::kDone);
        return training.parameters();
      };
      const auto train_to_a_skipped_step = [&](ToyTraining& training) {
        try {
          training.run(signals);
          ADD_FAILURE() << "training that ends with a skipped step is not done";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::kNumerical);
          EXPECT_NE(std::string(error.what())
                        .find("step 3: training ends, but its last step was "
                              "skipped as not finite"),
                    std::string::npos)
              << error.what();
        }
        return training.parameters();
      };
      const auto constant_rate =
          [](std::int64_t steps) {  // a schedule that does not depend on the run's length
            configs::Config config = toy_config(steps);
            config.mutable_train()->mutable_schedule()->set_shape(configs::Schedule::constant);
            return config;
          };
      ToyTraining two(constant_rate(2), group, at::kFloat);
      ToyTraining three(constant_rate(3), group, at::kFloat);
      ToyTraining spoilt(constant_rate(3), group, at::kFloat);
      spoilt.model.spoil(3, 35);  // the last sample of step 3: on the last rank only
      const at::Tensor after_two = train(two);
      EXPECT_TRUE(at::equal(train_to_a_skipped_step(spoilt), after_two));
      EXPECT_FALSE(at::equal(train(three), after_two));
      EXPECT_EQ(spoilt.state.step, 3);
      EXPECT_EQ(spoilt.state.skipped, 1);
      EXPECT_EQ(spoilt.state.consumed, 36);
      EXPECT_EQ(spoilt.state.tokens, two.state.tokens);
    });
  }
}

// configs.Train.fp16: a power-of-two scale changes no bit, and a scale that is too large is found
// by halving, without a step that counts as not finite.
TEST(Trainer, TheLossScaleLeavesNoTrace) {
  const StopSignals signals;
  run_ranks(2, [&](ProcessGroup& group) {
    const auto config = [](std::int64_t steps, configs::Train::Precision precision) {
      configs::Config result = toy_config(steps);
      result.mutable_train()->set_precision(precision);
      result.mutable_train()->set_max_skipped(2);
      result.mutable_train()->mutable_schedule()->set_shape(configs::Schedule::constant);
      return result;
    };
    ToyTraining plain(config(12, configs::Train::fp32), group, at::kFloat);
    ToyTraining scaled(config(12, configs::Train::fp16), group, at::kFloat);
    scaled.state.loss_scale.value = LossScale::kInitial;
    EXPECT_EQ(plain.run(signals), Outcome::kDone);
    EXPECT_EQ(scaled.run(signals), Outcome::kDone);
    EXPECT_TRUE(at::equal(scaled.parameters(), plain.parameters()));
    EXPECT_EQ(scaled.state.loss_scale.value, LossScale::kInitial);
    EXPECT_EQ(scaled.state.loss_scale.steps_since, 12);

    ToyTraining overflowing(config(30, configs::Train::fp16), group, at::kFloat);
    overflowing.state.loss_scale.value = 0x1p134;  // fp32 ends at 2^128
    EXPECT_EQ(overflowing.run(signals), Outcome::kDone);
    const LossScale& scale = overflowing.state.loss_scale;
    EXPECT_LT(scale.value, 0x1p128);
    EXPECT_GT(scale.value, 0x1p110);
    EXPECT_EQ(std::exp2(134) / scale.value, std::exp2(30 - scale.steps_since)) << "half a step";
    EXPECT_EQ(overflowing.state.skipped, 0);
    EXPECT_TRUE(at::isfinite(overflowing.parameters()).all().item<bool>());
    EXPECT_GT(overflowing.state.tokens, 0);
  });
}

TEST(LossScale, GrowsAfterManyGoodStepsAndHasAnEndOnBothSides) {
  LossScale scale{LossScale::kInitial};
  for (int i = 1; i < LossScale::kGrowAfter; ++i) scale.keep();
  EXPECT_EQ(scale.value, LossScale::kInitial);
  scale.keep();
  EXPECT_EQ(scale.value, 2 * LossScale::kInitial);
  for (int i = 0; i < 100 * LossScale::kGrowAfter; ++i) scale.keep();
  EXPECT_EQ(scale.value, LossScale::kMax);
  for (int i = 0; i < 100; ++i) scale.shrink();
  EXPECT_EQ(scale.value, LossScale::kMin);
  EXPECT_FALSE(scale.may_overflow());
}

TEST(Trainer, StopsWithAClearLineWhereThePolicySaysSo) {
  const StopSignals signals;
  const auto expect_stop = [&](const configs::Config& config, std::int64_t step,
                               const std::string& where) {
    run_ranks(2, [&](ProcessGroup& group) {
      ToyTraining training(config, group, at::kFloat);
      for (std::int64_t s = 2; s <= 6; ++s)
        training.model.spoil(s, 12 * s - 1);  // rank 1's last sample of each step
      try {
        training.run(signals);
        ADD_FAILURE() << "went on";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kNumerical);
        EXPECT_NE(std::string(error.what()).find(where), std::string::npos) << error.what();
        EXPECT_TRUE(at::isfinite(training.parameters()).all().item<bool>());
        EXPECT_EQ(training.state.step, step);
      }
    });
  };
  configs::Config config = toy_config(10);
  config.mutable_train()->set_non_finite(configs::Train::stop);
  expect_stop(config, 2, "step 2: not finite: loss of rank 1");
  config.mutable_train()->set_non_finite(configs::Train::skip);
  config.mutable_train()->set_max_skipped(3);
  expect_stop(config, 4, "step 4: not finite: loss of rank 1; 3 in a row");
}

TEST(Trainer, SkippedStepsInARowAreCountedAnewAfterAGoodOne) {
  const StopSignals signals;
  const auto group = make_single_group();
  configs::Config config = toy_config(8);
  config.mutable_train()->set_max_skipped(3);
  ToyTraining training(config, *group, at::kFloat);
  for (const std::int64_t step : {2, 3, 5, 6}) training.model.spoil(step, 12 * step - 1);
  EXPECT_EQ(training.run(signals), Outcome::kDone);
  EXPECT_EQ(training.state.skipped, 0);
}

TEST(Evaluator, HasTheSameBitsOnEveryNumberOfRanks) {
  const std::int64_t num_windows = 23;  // the last micro-batch is not full
  std::vector<Evaluation> results;
  std::int64_t most_read = 0;
  ToyModel model(at::kFloat);
  const auto sums = model.loss_sums(toy_batch(0, num_windows), std::nullopt);
  TargetCounts targets{.tokens = sums.count.item<std::int64_t>(), .bytes = 200};
  targets.unknown_tokens = 3;
  targets.unknown_bytes = 7;
  for (const int size : {1, 2, 3, 4, 9}) {
    std::vector<Evaluation> of_rank(static_cast<std::size_t>(size));
    run_ranks(size, [&](ProcessGroup& group) {
      ToyModel replica(at::kFloat);
      std::int64_t num_read = 0;
      Evaluator evaluator(replica, group,
                          {"valid", num_windows, 4, std::make_shared<TextTargets>(targets)},
                          [&](std::int64_t begin, std::int64_t end) {
                            num_read += end - begin;
                            return toy_batch(begin, end);
                          });
      of_rank[static_cast<std::size_t>(group.rank())] = *evaluator.run([] { return false; });
      if (size == 3 && group.rank() == 0) most_read = num_read;
    });
    for (const auto& result : of_rank) EXPECT_EQ(result.loss, of_rank[0].loss);
    results.push_back(of_rank[0]);
  }
  EXPECT_EQ(most_read, 8);  // each rank reads its share only
  for (const auto& result : results) {
    EXPECT_EQ(result.loss, results[0].loss);
    EXPECT_EQ(result.task.figures.at(0).value, results[0].task.figures.at(0).value);
    EXPECT_EQ(result.tokens, results[0].tokens);
  }
  EXPECT_EQ(results[0].tokens, sums.count.item<double>());
  EXPECT_EQ(results[0].task.counts.at(0).value, 200);
  EXPECT_NEAR(results[0].loss, (sums.nats / sums.count).item<double>(), 1e-6);
  const double bits = results[0].loss * static_cast<double>(results[0].tokens) / std::log(2);
  EXPECT_DOUBLE_EQ(results[0].task.figures.at(0).value, (bits + 8 * (7 + 3)) / 200);
}

// A batch without a target has no gradient, but momentum and weight decay would move the model.
TEST(Trainer, AStepWithoutTargetsChangesNothing) {
  const StopSignals signals;
  const auto run = [&](std::int64_t steps, std::set<std::int64_t> without_targets) {
    const auto group = make_single_group();
    configs::Config config = toy_config(steps);
    config.mutable_train()->mutable_schedule()->set_shape(configs::Schedule::constant);
    ToyTraining training(config, *group, at::kFloat);
    training.without_targets = std::move(without_targets);
    testing::internal::CaptureStderr();
    EXPECT_EQ(training.run(signals), Outcome::kDone);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("no token of its batch is a target") != std::string::npos,
              !training.without_targets.empty())
        << said;
    EXPECT_EQ(training.state.step, steps);
    EXPECT_EQ(training.state.skipped, 0);
    return std::pair(training.parameters(), training.state.tokens);
  };
  const auto [five, tokens_of_five] = run(5, {});
  const auto [seven, tokens_of_seven] = run(7, {6, 7});
  EXPECT_TRUE(at::equal(five, seven));
  EXPECT_EQ(tokens_of_five, tokens_of_seven);
  EXPECT_FALSE(at::equal(five, run(6, {}).first));
}

// Epochs of 30 samples, batches of 12: step s begins at sample 12 (s - 1).
TEST(Trainer, StepDecayFollowsTheSamplesThatWereConsumed) {
  const StopSignals signals;
  const auto group = make_single_group();
  configs::Config config = toy_config(9);
  configs::Schedule& schedule = *config.mutable_train()->mutable_schedule();
  schedule.set_shape(configs::Schedule::step_decay);
  schedule.set_warmup_steps(0);
  schedule.set_decay_factor(0);  // so that the parameters stand still from then on
  schedule.add_decay_epoch(2);
  const auto after = [&](std::int64_t steps, std::int64_t epoch) {
    config.mutable_train()->set_steps(steps);
    schedule.set_decay_epoch(0, static_cast<std::int32_t>(epoch));
    ToyTraining training(config, *group, at::kDouble);
    training.samples_per_epoch = 30;
    EXPECT_EQ(training.run(signals), Outcome::kDone);
    at::Tensor all = training.parameters();
    const std::int64_t statistics = training.model.parameters().statistics()[0].value.numel();
    return all.narrow(0, 0, all.numel() - statistics).clone();
  };
  const at::Tensor five = after(5, 2);  // begins at 48, in epoch 1; step 6 at 60, in epoch 2
  EXPECT_FALSE(at::equal(after(4, 2), five));
  EXPECT_TRUE(at::equal(after(6, 2), five));
  EXPECT_TRUE(at::equal(after(9, 2), five));
  EXPECT_FALSE(at::equal(after(6, 3), five));
}

// configs.Invariant: the whole training, including clipping and each optimizer, gives the same
// bits on any number of ranks, whatever the micro-batches and buckets.
TEST(Trainer, WithVirtualShardsAnyNumberOfRanksGivesTheSameBits) {
  const StopSignals signals;
  const auto single = make_single_group();
  for (const int shards : {12, 5, 1}) {
    for (const std::string optimizer : {"adamw", "adafactor", "sgd"}) {
      configs::Config config = toy_config(8);
      config.mutable_train()->mutable_invariant()->set_shards(shards);
      configs::Optimizer& chosen = *config.mutable_train()->mutable_optimizer();
      if (optimizer == "adafactor") chosen.mutable_adafactor();
      if (optimizer == "sgd") chosen.mutable_sgd()->set_momentum(0.9f);
      config.mutable_train()->set_micro_batch(2);
      ToyTraining reference(config, *single, at::kFloat);
      EXPECT_EQ(reference.run(signals), Outcome::kDone);
      for (const int size : {2, 3, 4, 6, 7}) {
        run_ranks(size, [&](ProcessGroup& group) {
          ToyTraining training(config, group, at::kFloat);
          EXPECT_EQ(training.run(signals), Outcome::kDone);
          EXPECT_TRUE(at::equal(training.parameters(), reference.parameters()))
              << shards << " shards on " << size << " ranks";
          EXPECT_EQ(training.state.tokens, reference.state.tokens);
        });
      }
    }
  }
  // Without shards the order of additions shows in some bit.
  ToyTraining plain(toy_config(8), *single, at::kFloat);
  plain.run(signals);
  bool differs = false;
  run_ranks(3, [&](ProcessGroup& group) {
    ToyTraining training(toy_config(8), group, at::kFloat);
    training.run(signals);
    if (group.rank() == 0) differs = !at::equal(training.parameters(), plain.parameters());
  });
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace birkhoff
