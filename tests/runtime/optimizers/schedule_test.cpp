// Learning rates over the steps.
#include "runtime/optimizers/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "configs/schema/config.pb.h"

namespace birkhoff {
namespace {

TEST(Schedule, HasTheDocumentedShapes) {
  configs::Schedule schedule;
  schedule.set_learning_rate(0.5f);
  schedule.set_final_learning_rate(0.25f);
  schedule.set_warmup_steps(4);
  const auto at_step = [&](std::int64_t step) { return learning_rate(schedule, step, 24, 0); };

  for (const auto shape :
       {configs::Schedule::constant, configs::Schedule::cosine, configs::Schedule::rsqrt}) {
    schedule.set_shape(shape);
    EXPECT_EQ(at_step(1), 0.125);
    EXPECT_EQ(at_step(2), 0.25);
    EXPECT_EQ(at_step(4), 0.5);
  }
  schedule.set_shape(configs::Schedule::constant);
  EXPECT_EQ(at_step(5), 0.5);
  EXPECT_EQ(at_step(24), 0.5);
  schedule.set_shape(configs::Schedule::cosine);
  EXPECT_NEAR(at_step(14), 0.375, 1e-15);  // half way between 4 and 24
  EXPECT_NEAR(at_step(24), 0.25, 1e-15);
  EXPECT_NEAR(at_step(30), 0.25, 1e-15);  // a shortened run stays at the end
  EXPECT_GT(at_step(5), at_step(6));
  schedule.set_shape(configs::Schedule::rsqrt);
  EXPECT_EQ(at_step(16), 0.25);
  schedule.set_shape(configs::Schedule::rsqrt_decay);
  EXPECT_EQ(at_step(1), 0.5);
  EXPECT_EQ(at_step(4), 0.5);
  EXPECT_EQ(at_step(16), 0.25);
  schedule.set_warmup_steps(0);
  for (const auto shape : {configs::Schedule::constant, configs::Schedule::cosine,
                           configs::Schedule::rsqrt, configs::Schedule::rsqrt_decay}) {
    schedule.set_shape(shape);
    EXPECT_GT(at_step(1), 0.49);
    EXPECT_LE(at_step(1), 0.5);
  }
}

TEST(Schedule, EndsAtAStepOfItsOwn) {
  configs::Schedule schedule;
  schedule.set_learning_rate(1);
  schedule.set_final_learning_rate(0.25);
  schedule.set_warmup_steps(10);
  schedule.set_steps(50);
  const auto rate = [&](std::int64_t step) { return learning_rate(schedule, step, 1000, 0); };
  schedule.set_shape(configs::Schedule::cosine);
  EXPECT_DOUBLE_EQ(rate(30), 0.625);  // the middle
  EXPECT_DOUBLE_EQ(rate(50), 0.25);
  EXPECT_DOUBLE_EQ(rate(900), 0.25);
  schedule.set_shape(configs::Schedule::warmup_stable_decay);
  schedule.set_decay_steps(20);
  EXPECT_DOUBLE_EQ(rate(5), 0.5);
  for (const std::int64_t step : {10, 20, 30}) EXPECT_DOUBLE_EQ(rate(step), 1) << step;
  EXPECT_DOUBLE_EQ(rate(40), 0.625);
  EXPECT_DOUBLE_EQ(rate(50), 0.25);
  EXPECT_DOUBLE_EQ(rate(900), 0.25);
  schedule.clear_steps();
  schedule.clear_decay_steps();  // a tenth of the run
  EXPECT_DOUBLE_EQ(rate(900), 1);
  EXPECT_DOUBLE_EQ(rate(950), 0.625);
}

TEST(Schedule, StepDecayCountsTheEpochsThatHaveBegun) {
  configs::Schedule schedule;
  schedule.set_shape(configs::Schedule::step_decay);
  schedule.set_learning_rate(0.5f);
  schedule.set_warmup_steps(4);
  schedule.set_decay_factor(0.25f);
  for (const int epoch : {2, 3, 7}) schedule.add_decay_epoch(epoch);
  const auto rate = [&](std::int64_t step, std::int64_t epoch) {
    return learning_rate(schedule, step, /*num_steps=*/24, epoch);
  };
  EXPECT_EQ(rate(4, 0), 0.5);
  EXPECT_EQ(rate(9, 1), 0.5);
  EXPECT_EQ(rate(9, 2), 0.125);
  EXPECT_EQ(rate(9, 3), 0.03125);
  EXPECT_EQ(rate(9, 6), 0.03125);
  EXPECT_EQ(rate(9, 7), 0.0078125);
  EXPECT_EQ(rate(1000, 100), 0.0078125);
  EXPECT_EQ(rate(2, 0), 0.25);  // the warm-up
  EXPECT_EQ(rate(2, 2), 0.0625);
}

}  // namespace
}  // namespace birkhoff
