#include "cluster/health/slow_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// Ranks whose passes take 0.1 s a step and sequence. They report every half second.
class TestRanks {
 public:
  explicit TestRanks(int size) : ranks(size), statuses(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      RankStatus& status = statuses[static_cast<std::size_t>(rank)];
      status.rank = rank;
      status.phase = Phase::kStep;
      status.sequences = 1;
      status.step_times = {.data = 0.001, .passes = 0.1, .update = 0.01};
      status.set_host("node" + std::to_string(rank));
    }
  }

  // Simulates `number` steps; all ranks report after every five.
  std::vector<SlowRank> steps(int number) {
    std::vector<SlowRank> found;
    for (int done = 0; done < number; done += 5) {
      now += 0.5;
      for (RankStatus& status : statuses) {
        status.step = status.num_timed += 5;
        ranks.on_heartbeat(status);
      }
      for (const SlowRank& slow : ranks.find(now)) found.push_back(slow);
    }
    return found;
  }

  SlowRanks ranks;
  std::vector<RankStatus> statuses;
  double now = 100;
};

TEST(SlowRanks, AreNamedOnceWithHostStepAndPhase) {
  TestRanks ranks(4);
  EXPECT_THAT(ranks.steps(100), IsEmpty());
  ranks.statuses[2].step_times.passes = 0.15;
  EXPECT_THAT(ranks.steps(45), IsEmpty()) << "not in less than five seconds";
  const std::vector<SlowRank> found = ranks.steps(200);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rank, 2);
  EXPECT_EQ(found[0].host, "node2");
  EXPECT_EQ(found[0].step, 155);
  EXPECT_THAT(found[0].text(),
              AllOf(HasSubstr("rank 2 on node2 is slow: it takes 161.0 ms"),
                    HasSubstr("45 % more than the usual 111.0 ms"), HasSubstr("backward passes")));
  // A new episode is named again.
  ranks.statuses[2].step_times.passes = 0.1;
  EXPECT_THAT(ranks.steps(100), IsEmpty());
  ranks.statuses[2].step_times.passes = 0.15;
  EXPECT_THAT(ranks.steps(100), SizeIs(1));
}

TEST(SlowRanks, NameThePhaseThatLosesMost) {
  for (const auto& [phase, name] :
       {std::pair(&StepTimes::data, "reading data"), std::pair(&StepTimes::update, "the update")}) {
    TestRanks ranks(3);
    ranks.statuses[1].step_times.*phase += 0.05;
    const std::vector<SlowRank> found = ranks.steps(100);
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_EQ(found[0].phase, name);
  }
}

TEST(SlowRanks, FewPercentOrMillisecondsAreNoFault) {
  TestRanks ranks(4);
  ranks.statuses[0].step_times.passes = 0.12;  // 18 % of the busy time
  EXPECT_THAT(ranks.steps(200), IsEmpty());
  for (RankStatus& status : ranks.statuses) status.step_times = {0, 0.002, 0};
  ranks.statuses[0].step_times.passes = 0.006;
  EXPECT_THAT(ranks.steps(200), IsEmpty());
}

TEST(SlowRanks, HalfOfTheRanksMayBeSlow) {
  for (const int size : {2, 4}) {
    TestRanks ranks(size);
    for (int rank = 0; rank < size; rank += 2) {
      ranks.statuses[static_cast<std::size_t>(rank)].step_times.passes = 0.13;
    }
    const std::vector<SlowRank> found = ranks.steps(200);
    ASSERT_THAT(found, SizeIs(static_cast<std::size_t>(size / 2)));
    EXPECT_THAT(found[0].text(), HasSubstr("27 % more than the usual 111.0 ms"));
  }
}

// An interrupted slowness is noise.
TEST(SlowRanks, ABreakBeginsAnew) {
  TestRanks ranks(4);
  ranks.steps(50);
  for (int i = 0; i < 10; ++i) {
    ranks.statuses[3].step_times.passes = 0.2;
    EXPECT_THAT(ranks.steps(45), IsEmpty());
    ranks.statuses[3].step_times.passes = 0.1;
    EXPECT_THAT(ranks.steps(5), IsEmpty());
  }
}

// At every eighth report a rank's median is twice as long, as other processes may make it.
TEST(SlowRanks, RandomTimesRaiseNoAlarm) {
  std::mt19937 random(7);
  for (const int size : {2, 3, 4, 16}) {
    TestRanks ranks(size);
    for (int i = 0; i < 2000; ++i) {
      for (RankStatus& status : ranks.statuses) {
        status.step_times.passes = 0.1 * (random() % 8 == 0 ? 2 : 1);
      }
      ASSERT_THAT(ranks.steps(5), IsEmpty());
    }
  }
}

// 3 sequences on 2 ranks: one has twice the work. Ranks without any are left out.
TEST(SlowRanks, UnequalSharesAreNoFault) {
  TestRanks ranks(4);
  const std::vector<std::int64_t> shares = {2, 1, 2, 0};
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    ranks.statuses[rank].sequences = shares[rank];
    ranks.statuses[rank].step_times.passes = 0.05 + 0.1 * static_cast<double>(shares[rank]);
  }
  EXPECT_THAT(ranks.steps(200), IsEmpty());
  ranks.statuses[1].step_times.passes = 0.4;  // slower than those with more work
  EXPECT_THAT(ranks.steps(200), SizeIs(1));
}

TEST(SlowRanks, WaitForAllRanks) {
  TestRanks ranks(3);
  ranks.statuses.pop_back();
  ranks.statuses[1].step_times.passes = 1;
  EXPECT_THAT(ranks.steps(200), IsEmpty());
}

}  // namespace
}  // namespace birkhoff
