// Heartbeats over real sockets; ranks are threads of this process.
#include "cluster/health/heartbeat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "cluster/base/collectives/thread_group.h"

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

// body(rank, set): set(sign) changes what the rank tells of itself.
Heard run_heartbeats(int size, const WatchdogLimits& limits,
                     const std::function<void(Group&, const std::function<void(Sign)>&)>& body) {
  Heard heard;
  std::mutex mutex;
  testing::internal::CaptureStderr();
  run_ranks(size, [&](Group& group) {
    std::mutex sign_mutex;
    Sign current;
    current.phase = Phase::kStep;
    current.usual_seconds = 0.01;
    current.set_host("node" + std::to_string(group.rank()));
    const Heartbeat heartbeat(
        group, limits,
        [&] {
          const std::lock_guard lock(sign_mutex);
          return current;
        },
        [&](const Verdict& verdict) {
          const std::lock_guard lock(mutex);
          heard.alarms.push_back(verdict.text);
        });
    body(group, [&](Sign sign) {
      const std::lock_guard lock(sign_mutex);
      sign.host = current.host;
      current = sign;
    });
  });
  heard.log = testing::internal::GetCapturedStderr();
  return heard;
}

Sign step_sign(std::int64_t step) {
  Sign sign;
  sign.phase = Phase::kStep;
  sign.step = sign.progress = step;
  sign.usual_seconds = 0.01;
  return sign;
}

constexpr WatchdogLimits kShort{1.0, 4, 900};

TEST(Heartbeat, IsSilentWhileRanksMoveAndWhenTheyEndAtDifferentTimes) {
  for (const int size : {1, 2, 4}) {
    const Heard heard =
        run_heartbeats(size, kShort, [](Group& group, const std::function<void(Sign)>& set) {
          for (int step = 1; step <= 20; ++step) {
            set(step_sign(step));
            sleep_ms(100);
          }
          sleep_ms(300 * group.rank());  // later ranks end later: rank 0 is not missed
        });
    EXPECT_TRUE(heard.alarms.empty()) << heard.alarms[0];
    EXPECT_EQ(heard.log, "");
  }
}

TEST(Heartbeat, NamesTheRankThatStopsMoving) {
  const Heard heard =
      run_heartbeats(3, kShort, [](Group& group, const std::function<void(Sign)>& set) {
        for (int i = 0; i < 30; ++i) {
          Sign sign = step_sign(std::min(i, 5));
          sign.operation_number = 17;
          sign.set_operation("all_reduce 'counts'");
          sign.waiting = i >= 5 && group.rank() != 1;
          set(sign);
          sleep_ms(100);
        }
      });
  ASSERT_EQ(heard.alarms.size(), 1u) << "once, by rank 0";
  EXPECT_THAT(heard.alarms[0],
              HasSubstr("rank 1 on node1, in step 5, after all_reduce 'counts' "
                        "(operation 17); the others (ranks 0, 2) are in step 5, waiting"));
}

TEST(Heartbeat, ZeroSecondsIsOff) {
  const Heard heard = run_heartbeats(2, {0, 4, 900}, [](Group& group, const auto&) {
    EXPECT_EQ(group.ring().total_operations(), 0);
    sleep_ms(200);
  });
  EXPECT_TRUE(heard.alarms.empty());
}

}  // namespace
}  // namespace birkhoff
