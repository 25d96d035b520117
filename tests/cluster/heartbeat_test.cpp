// Heartbeats over real sockets; ranks are threads of this process.
#include "cluster/health/heartbeat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "tests/cluster/base/thread_group.h"

namespace birkhoff {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

void sleep_ms(int ms) { std::this_thread::sleep_for(milliseconds(ms)); }

// What one run of heartbeats on `size` ranks reported: every alarm, and the log.
struct Heard {
  std::vector<std::string> alarms;
  std::string log;
};

// body(group, set): set(status) changes what the rank reports.
Heard run_heartbeats(
    int size, const WatchdogLimits& limits,
    const std::function<void(ProcessGroup&, const std::function<void(RankStatus)>&)>& body) {
  Heard heard;
  std::mutex mutex;
  testing::internal::CaptureStderr();
  run_ranks(size, [&](ProcessGroup& group) {
    std::mutex sign_mutex;
    RankStatus current;
    current.phase = Phase::kStep;
    current.usual_seconds = 0.01;
    current.set_host("node" + std::to_string(group.rank()));
    const Heartbeat heartbeat(
        group, limits,
        [&] {
          const std::lock_guard lock(sign_mutex);
          return current;
        },
        [&](const Diagnosis& diagnosis) {
          const std::lock_guard lock(mutex);
          heard.alarms.push_back(diagnosis.text);
        });
    body(group, [&](RankStatus status) {
      const std::lock_guard lock(sign_mutex);
      status.host = current.host;
      current = status;
    });
  });
  heard.log = testing::internal::GetCapturedStderr();
  return heard;
}

RankStatus step_status(std::int64_t step) {
  RankStatus status;
  status.phase = Phase::kStep;
  status.step = status.progress = step;
  status.usual_seconds = 0.01;
  return status;
}

constexpr WatchdogLimits kShort{1.0, 4, 900};

TEST(Heartbeat, IsSilentWhileRanksMoveAndWhenTheyEndAtDifferentTimes) {
  for (const int size : {1, 2, 4}) {
    const Heard heard = run_heartbeats(
        size, kShort, [](ProcessGroup& group, const std::function<void(RankStatus)>& set) {
          for (int step = 1; step <= 20; ++step) {
            set(step_status(step));
            sleep_ms(100);
          }
          sleep_ms(300 * group.rank());  // higher ranks end later: they do not miss rank 0
        });
    EXPECT_TRUE(heard.alarms.empty()) << heard.alarms[0];
    EXPECT_EQ(heard.log, "");
  }
}

TEST(Heartbeat, NamesTheRankThatStopsMoving) {
  const Heard heard = run_heartbeats(
      3, kShort, [](ProcessGroup& group, const std::function<void(RankStatus)>& set) {
        for (int i = 0; i < 30; ++i) {
          RankStatus status = step_status(std::min(i, 5));
          status.operation_number = 17;
          status.set_operation("all_reduce 'counts'");
          status.waiting = i >= 5 && group.rank() != 1;
          set(status);
          sleep_ms(100);
        }
      });
  ASSERT_EQ(heard.alarms.size(), 1u) << "once, by rank 0";
  EXPECT_THAT(heard.alarms[0],
              HasSubstr("rank 1 on node1, in step 5, after all_reduce 'counts' "
                        "(operation 17); the others (ranks 0, 2) wait in step 5, inside"));
}

TEST(Heartbeat, ZeroSecondsIsOff) {
  const Heard heard = run_heartbeats(2, {0, 4, 900}, [](ProcessGroup& group, const auto&) {
    EXPECT_EQ(group.ring().total_operations(), 0);
    sleep_ms(200);
  });
  EXPECT_TRUE(heard.alarms.empty());
}

}  // namespace
}  // namespace birkhoff
