#include "cluster/health/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// A world of ranks that report their status every half second.
class TestWorld {
 public:
  explicit TestWorld(int num_ranks, WatchdogLimits limits = {})
      : watchdog(num_ranks, limits), statuses(static_cast<std::size_t>(num_ranks)) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      RankStatus& status = statuses[static_cast<std::size_t>(rank)];
      status.rank = rank;
      status.phase = Phase::kStep;
      status.step = 7;
      status.usual_seconds = 0.1;
      status.set_host("node" + std::to_string(rank));
    }
  }

  // All ranks but `silent` report until `end`; those in `moving` make progress.
  void pass(double end, const std::vector<int>& moving, int silent = -1) {
    for (; now <= end; now += 0.5) {
      for (RankStatus& status : statuses) {
        if (std::ranges::find(moving, status.rank) != moving.end()) ++status.progress;
        if (status.rank != silent) watchdog.on_heartbeat(status, now);
      }
    }
    now = end;
  }

  void wait_in(int rank, const std::string& operation, std::int64_t number) {
    RankStatus& status = statuses[static_cast<std::size_t>(rank)];
    status.set_operation(operation);
    status.operation_number = number;
    status.waiting = 1;
    ++status.progress;
  }

  // The diagnosis's text; empty while all is well.
  std::string diagnosis(ExitCode expected = ExitCode::kHang) const {
    const auto diagnosis = watchdog.diagnosis(now);
    if (!diagnosis) return "";
    EXPECT_EQ(diagnosis->code, expected);
    EXPECT_EQ(diagnosis->text.find('\n'), std::string::npos);
    EXPECT_THAT(diagnosis->text, HasSubstr("run the same command again"));
    return diagnosis->text;
  }

  Watchdog watchdog;
  std::vector<RankStatus> statuses;
  double now = 100;
};

TEST(Watchdog, IsContentWhileAnybodyMoves) {
  TestWorld world(3);
  world.pass(200, {1});
  EXPECT_EQ(world.diagnosis(), "");
}

TEST(Watchdog, NamesASilentRankItsStepAndOperation) {
  TestWorld world(3);
  world.wait_in(2, "all_reduce 'gradients of bucket 4'", 99);
  world.pass(101, {0, 1, 2});
  world.pass(108, {0, 1}, 2);
  EXPECT_EQ(world.diagnosis(), "");
  world.pass(109.6, {0, 1}, 2);
  EXPECT_THAT(
      world.diagnosis(),
      HasSubstr("rank 2 on node2 has been silent for 8.6 s: its process is stopped, or its machine "
                "or network is down; its last status: in step 7, inside all_reduce 'gradients of "
                "bucket 4' (operation 99); run"));
  // The other ranks have continued to the operation in which they wait for it.
  world.statuses[0].step = 9;
  world.wait_in(0, "all_reduce 'counts'", 120);
  world.pass(110, {1}, 2);
  EXPECT_THAT(world.diagnosis(),
              HasSubstr("; rank 0 waits for it in step 9, inside all_reduce 'counts' "
                        "(operation 120); its last status: in step 7"));
}

TEST(Watchdog, NamesTheRankThatIsNotWhereTheOthersWait) {
  TestWorld world(4);
  for (const int rank : {0, 1, 3}) world.wait_in(rank, "all_reduce 'counts'", 45);
  world.statuses[2].set_operation("all_reduce 'gradients of bucket 0'");
  world.statuses[2].operation_number = 44;
  world.pass(107.9, {});
  EXPECT_EQ(world.diagnosis(), "");
  world.pass(108.6, {});
  EXPECT_THAT(world.diagnosis(),
              AllOf(HasSubstr("no progress for 8.6 s: rank 2 on node2, in step 7, after all_reduce "
                              "'gradients of bucket 0' (operation 44); the others (ranks 0, 1, 3) "
                              "wait in step 7, inside all_reduce 'counts' (operation 45)"),
                    Not(HasSubstr("rank 1 on"))));
}

// On a mesh the ranks that wait for one rank may wait in operations of different groups.
TEST(Watchdog, BlamesNoRankThatWaitsIfAnotherDoesNot) {
  TestWorld world(4);
  for (const int rank : {0, 1}) world.wait_in(rank, "all_reduce 'gradients of bucket 0'", 45);
  world.wait_in(2, "all_gather 'tokens'", 80);
  world.pass(109, {});
  EXPECT_THAT(world.diagnosis(), AllOf(HasSubstr("rank 3 on node3, in step 7"),
                                       HasSubstr("the others (ranks 0, 1) wait in step 7"),
                                       Not(HasSubstr("rank 2 on"))));
}

TEST(Watchdog, NamesTheRankThatSkippedACollective) {
  TestWorld world(3);
  for (const int rank : {0, 2}) world.wait_in(rank, "all_reduce 'counts'", 45);
  world.wait_in(1, "all_reduce 'gradients of bucket 0'", 45);
  world.pass(109, {});
  EXPECT_THAT(world.diagnosis(), HasSubstr("rank 1 on node1, in step 7, inside all_reduce "
                                           "'gradients of bucket 0' (operation 45); the others"));
}

TEST(Watchdog, AllInOneOperationIsTheNetwork) {
  TestWorld world(2);
  for (const int rank : {0, 1}) world.wait_in(rank, "barrier 'end'", 3);
  world.pass(109, {});
  EXPECT_THAT(world.diagnosis(), HasSubstr("all ranks wait in step 7, inside barrier 'end'"));
}

TEST(Watchdog, SlowStepsStartsAndSavesGetTheirTime) {
  TestWorld slow(2);
  for (RankStatus& status : slow.statuses) status.usual_seconds = 30;
  slow.pass(219, {});
  EXPECT_EQ(slow.diagnosis(), "") << "4 steps of 30 s";
  slow.pass(221, {});
  EXPECT_NE(slow.diagnosis(), "");

  // A rank that saves, or whose pace is not known yet, makes the others wait.
  TestWorld saving(2);
  saving.statuses[1].phase = Phase::kSave;
  saving.statuses[1].usual_seconds = 0;
  saving.pass(999, {});
  EXPECT_EQ(saving.diagnosis(), "");
  saving.pass(1001, {});
  EXPECT_THAT(saving.diagnosis(), HasSubstr("rank 1 on node1, in the save after step 7"));
}

TEST(Watchdog, ADeadRankIsReportedSoonAndJudgedLater) {
  TestWorld world(3);
  world.pass(105, {0, 1, 2});
  world.watchdog.on_disconnect(1, world.now);
  EXPECT_TRUE(world.watchdog.warnings(world.now).empty());
  for (const int rank : {0, 2}) world.wait_in(rank, "all_reduce 'counts'", 45);
  world.pass(105.5, {}, 1);
  EXPECT_THAT(
      world.watchdog.warnings(world.now),
      testing::ElementsAre(HasSubstr("rank 1 on node1 exited without an error message; ranks 0, 2 "
                                     "wait for it in step 7, inside all_reduce 'counts' "
                                     "(operation 45)")));
  EXPECT_TRUE(world.watchdog.warnings(world.now).empty()) << "once";
  EXPECT_EQ(world.diagnosis(), "") << "mpirun's turn";
  world.pass(109, {0, 2}, 1);
  EXPECT_THAT(world.diagnosis(ExitCode::kPeer), HasSubstr("rank 1 on node1"));
}

TEST(Watchdog, MissesNobodyWhoSaidGoodbyeOrWasNeverHeard) {
  TestWorld world(3);
  world.statuses[1].phase = Phase::kEnd;
  world.pass(102, {0, 1}, 2);
  world.pass(200, {0}, 1);
  world.watchdog.on_disconnect(1, world.now);
  world.pass(210, {0}, 1);
  EXPECT_TRUE(world.watchdog.warnings(world.now).empty());
  EXPECT_EQ(world.diagnosis(), "");
  Watchdog nobody(2, {});
  EXPECT_FALSE(nobody.diagnosis(1e6));
}

TEST(Watchdog, ForgivesWhenItSleptItself) {
  TestWorld world(2);
  world.pass(101, {0, 1});
  world.now = 500;
  world.watchdog.reset(world.now);
  EXPECT_EQ(world.diagnosis(), "");
  world.pass(509, {});
  EXPECT_NE(world.diagnosis(), "");
}

TEST(Watchdog, CutsTextsThatAreTooLong) {
  RankStatus status;
  status.set_host(std::string(500, 'h'));
  status.set_operation(std::string(500, 'o'));
  EXPECT_EQ(std::string(status.host.data()).size(), status.host.size() - 1);
  EXPECT_EQ(std::string(status.operation.data()).size(), status.operation.size() - 1);
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
