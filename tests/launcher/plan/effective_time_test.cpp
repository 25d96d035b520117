// The share of a job's time that counts, next to a simulation.
#include "launcher/plan/effective_time.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "configs/schema/config.pb.h"

namespace birkhoff {
namespace {

// The share of steps that count, by trying: time passes until the next fault, wherever that falls.
double simulated_share(const FaultModel& faults, double interval) {
  std::mt19937_64 random(1);
  std::exponential_distribution<double> gap(1 / faults.seconds_between_faults());
  double time = 0, done = 0;
  for (int fault = 0; fault < 200'000; ++fault) {
    const double alive = gap(random);
    time += alive;
    const double worked = alive - (fault == 0 ? 0 : faults.restart_seconds);
    if (worked > 0) done += interval * std::floor(worked / (interval + faults.save_seconds));
  }
  return done / time;
}

TEST(EffectiveTime, IsThatOfASimulation) {
  for (const FaultModel& faults :
       {FaultModel{24, 30, 120}, FaultModel{4, 5, 600}, FaultModel{200, 60, 60}}) {
    const double best = best_interval_seconds(faults);
    for (const double interval : {best / 4, best, 4 * best}) {
      const EffectiveTime share = effective_time(faults, interval);
      EXPECT_NEAR(share.steps, simulated_share(faults, interval), 0.005) << interval;
      EXPECT_NEAR(share.steps + share.saves + share.lost + share.restarts, 1, 1e-12);
      EXPECT_GT(std::min({share.saves, share.lost, share.restarts}), 0);
    }
  }
}

TEST(EffectiveTime, TheBestIntervalIsTheBest) {
  for (const double faults_per_day : {0.1, 1.0, 10.0, 100.0}) {
    for (const double save : {0.1, 10.0, 100.0}) {
      const FaultModel faults{faults_per_day, save, 60};
      const double best = effective_time(faults, best_interval_seconds(faults)).steps;
      for (double interval = 1; interval < 1e6; interval *= 1.01) {
        EXPECT_LT(effective_time(faults, interval).steps, best + 1e-3);
      }
    }
  }
}

TEST(EffectiveTime, WithoutFaultsOnlySavesCost) {
  const EffectiveTime share = effective_time({0, 10, 60}, 90);
  EXPECT_DOUBLE_EQ(share.steps, 0.9);
  EXPECT_DOUBLE_EQ(share.saves, 0.1);
  EXPECT_EQ(share.lost + share.restarts, 0);
  EXPECT_EQ(lost_seconds_per_fault({0, 10, 60}, 90), 0);
}

TEST(EffectiveTime, AFaultLosesHalfOfAShortInterval) {
  EXPECT_NEAR(lost_seconds_per_fault({1, 0, 60}, 100), 50, 0.1);
}

// With the default interval between saves, steps of up to 0.7 s, and a restart that takes as long
// as the slowest of tests/nightly.
TEST(EffectiveTime, AFaultEveryThreeHoursCostsTwoPercent) {
  const auto every = static_cast<double>(configs::Config().checkpoint().every());
  const EffectiveTime share = effective_time(
      {.faults_per_day = 8, .save_seconds = 0.1, .restart_seconds = 15}, 0.7 * every);
  EXPECT_GT(share.steps, 0.98);
}

}  // namespace
}  // namespace birkhoff
