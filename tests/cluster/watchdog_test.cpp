#include "cluster/health/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// A world of ranks whose signs come every half second.
class TestWorld {
 public:
  explicit TestWorld(int num_ranks, WatchdogLimits limits = {})
      : watchdog(num_ranks, limits), signs(static_cast<std::size_t>(num_ranks)) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      Sign& sign = signs[static_cast<std::size_t>(rank)];
      sign.rank = rank;
      sign.phase = Phase::kStep;
      sign.step = 7;
      sign.usual_seconds = 0.1;
      sign.set_host("node" + std::to_string(rank));
    }
  }

  // All but `silent` tell their signs until `end`; those in `moving` make progress.
  void pass(double end, const std::vector<int>& moving, int silent = -1) {
    for (; now <= end; now += 0.5) {
      for (Sign& sign : signs) {
        if (std::ranges::find(moving, sign.rank) != moving.end()) ++sign.progress;
        if (sign.rank != silent) watchdog.hear(sign, now);
      }
    }
    now = end;
  }

  void wait_in(int rank, const std::string& operation, std::int64_t number) {
    Sign& sign = signs[static_cast<std::size_t>(rank)];
    sign.set_operation(operation);
    sign.operation_number = number;
    sign.waiting = 1;
    ++sign.progress;
  }

  // The verdict's text; empty while all is well.
  std::string verdict(ExitCode expected = ExitCode::kHang) const {
    const auto verdict = watchdog.verdict(now);
    if (!verdict) return "";
    EXPECT_EQ(verdict->code, expected);
    EXPECT_EQ(verdict->text.find('\n'), std::string::npos);
    EXPECT_THAT(verdict->text, HasSubstr("run the same command again"));
    return verdict->text;
  }

  Watchdog watchdog;
  std::vector<Sign> signs;
  double now = 100;
};

TEST(Watchdog, IsContentWhileAnybodyMoves) {
  TestWorld world(3);
  world.pass(200, {1});
  EXPECT_EQ(world.verdict(), "");
}

TEST(Watchdog, NamesASilentRankItsStepAndOperation) {
  TestWorld world(3);
  world.wait_in(2, "all_reduce 'gradients of bucket 4'", 99);
  world.pass(101, {0, 1, 2});
  world.pass(108, {0, 1}, 2);
  EXPECT_EQ(world.verdict(), "");
  world.pass(109.6, {0, 1}, 2);
  EXPECT_THAT(
      world.verdict(),
      HasSubstr("rank 2 on node2, last heard in step 7, waiting in all_reduce 'gradients of "
                "bucket 4' (operation 99): silent for 8.6 s"));
  // The others have gone on to where they need it.
  world.signs[0].step = 9;
  world.wait_in(0, "all_reduce 'counts'", 120);
  world.pass(110, {1}, 2);
  EXPECT_THAT(world.verdict(),
              HasSubstr("rank 2 on node2, missed by rank 0 in step 9, waiting in "
                        "all_reduce 'counts' (operation 120), last heard in step 7"));
}

TEST(Watchdog, NamesTheRankThatIsNotWhereTheOthersWait) {
  TestWorld world(4);
  for (const int rank : {0, 1, 3}) world.wait_in(rank, "all_reduce 'counts'", 45);
  world.signs[2].set_operation("all_reduce 'gradients of bucket 0'");
  world.signs[2].operation_number = 44;
  world.pass(107.9, {});
  EXPECT_EQ(world.verdict(), "");
  world.pass(108.6, {});
  EXPECT_THAT(world.verdict(),
              AllOf(HasSubstr("no progress for 8.6 s: rank 2 on node2, in step 7, after all_reduce "
                              "'gradients of bucket 0' (operation 44); the others (ranks 0, 1, 3) "
                              "are in step 7, waiting in all_reduce 'counts' (operation 45)"),
                    Not(HasSubstr("rank 1 on"))));
}

TEST(Watchdog, NamesTheRankThatSkippedACollective) {
  TestWorld world(3);
  for (const int rank : {0, 2}) world.wait_in(rank, "all_reduce 'counts'", 45);
  world.wait_in(1, "all_reduce 'gradients of bucket 0'", 45);
  world.pass(109, {});
  EXPECT_THAT(world.verdict(), HasSubstr("rank 1 on node1, in step 7, waiting in all_reduce "
                                         "'gradients of bucket 0' (operation 45); the others"));
}

TEST(Watchdog, AllInOneOperationIsTheNetwork) {
  TestWorld world(2);
  for (const int rank : {0, 1}) world.wait_in(rank, "barrier 'end'", 3);
  world.pass(109, {});
  EXPECT_THAT(world.verdict(), HasSubstr("all ranks are in step 7, waiting in barrier 'end'"));
}

TEST(Watchdog, SlowStepsStartsAndSavesGetTheirTime) {
  TestWorld slow(2);
  for (Sign& sign : slow.signs) sign.usual_seconds = 30;
  slow.pass(219, {});
  EXPECT_EQ(slow.verdict(), "") << "4 steps of 30 s";
  slow.pass(221, {});
  EXPECT_NE(slow.verdict(), "");

  // One rank that saves, or has not found its pace, makes the others wait.
  TestWorld saving(2);
  saving.signs[1].phase = Phase::kSave;
  saving.signs[1].usual_seconds = 0;
  saving.pass(999, {});
  EXPECT_EQ(saving.verdict(), "");
  saving.pass(1001, {});
  EXPECT_THAT(saving.verdict(), HasSubstr("rank 1 on node1, in the save after step 7"));
}

TEST(Watchdog, ADeadRankIsReportedSoonAndJudgedLater) {
  TestWorld world(3);
  world.pass(105, {0, 1, 2});
  world.watchdog.lose(1, world.now);
  EXPECT_TRUE(world.watchdog.news(world.now).empty());
  for (const int rank : {0, 2}) world.wait_in(rank, "all_reduce 'counts'", 45);
  world.pass(105.5, {}, 1);
  EXPECT_THAT(world.watchdog.news(world.now),
              testing::ElementsAre(HasSubstr("rank 1 on node1, missed by ranks 0, 2 in step 7, "
                                             "waiting in all_reduce 'counts' (operation 45)")));
  EXPECT_TRUE(world.watchdog.news(world.now).empty()) << "once";
  EXPECT_EQ(world.verdict(), "") << "mpirun's turn";
  world.pass(109, {0, 2}, 1);
  EXPECT_THAT(world.verdict(ExitCode::kPeer), HasSubstr("rank 1 on node1"));
}

TEST(Watchdog, MissesNobodyWhoSaidGoodbyeOrWasNeverHeard) {
  TestWorld world(3);
  world.signs[1].phase = Phase::kEnd;
  world.pass(102, {0, 1}, 2);
  world.pass(200, {0}, 1);
  world.watchdog.lose(1, world.now);
  world.pass(210, {0}, 1);
  EXPECT_TRUE(world.watchdog.news(world.now).empty());
  EXPECT_EQ(world.verdict(), "");
  Watchdog nobody(2, {});
  EXPECT_FALSE(nobody.verdict(1e6));
}

TEST(Watchdog, ForgivesWhenItSleptItself) {
  TestWorld world(2);
  world.pass(101, {0, 1});
  world.now = 500;
  world.watchdog.forgive(world.now);
  EXPECT_EQ(world.verdict(), "");
  world.pass(509, {});
  EXPECT_NE(world.verdict(), "");
}

TEST(Watchdog, CutsTextsThatAreTooLong) {
  Sign sign;
  sign.set_host(std::string(500, 'h'));
  sign.set_operation(std::string(500, 'o'));
  EXPECT_EQ(std::string(sign.host.data()).size(), sign.host.size() - 1);
  EXPECT_EQ(std::string(sign.operation.data()).size(), sign.operation.size() - 1);
}

TEST(Activity, KnowsTheMedianStepAndTheLongestEvaluationTick) {
  Activity activity;
  EXPECT_EQ(activity.snapshot().usual_seconds, 0);
  for (int step = 1; step <= 3; ++step) activity.enter(Phase::kStep, step);
  EXPECT_EQ(activity.snapshot().usual_seconds, 0) << "two steps are done: too few";
  activity.enter(Phase::kStep, 4);
  const Activity::Snapshot fourth = activity.snapshot();
  EXPECT_GT(fourth.usual_seconds, 0);
  EXPECT_EQ(fourth.step, 4);
  activity.enter(Phase::kEvaluate, 4);
  EXPECT_EQ(activity.snapshot().usual_seconds, 0);
  activity.tick();
  EXPECT_GT(activity.snapshot().usual_seconds, 0);
  activity.enter(Phase::kSave, 4);
  EXPECT_EQ(activity.snapshot().usual_seconds, 0);
  EXPECT_GT(activity.snapshot().ticks, fourth.ticks);
}

}  // namespace
}  // namespace birkhoff
