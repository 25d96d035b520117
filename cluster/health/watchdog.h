// Decides from what ranks tell of themselves whether a job hangs, and who is to blame. Knows
// neither sockets nor clocks: cluster/health/heartbeat.h carries the signs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/activity.h"
#include "cluster/base/error.h"

namespace birkhoff {

// How long is too long, in seconds: the larger of `seconds` and `steps` times what a sign of
// progress usually takes; `patient_seconds` where that is not known.
struct WatchdogLimits {
  double seconds = 8;
  double steps = 4;
  double patient_seconds = 900;
};

// What a rank tells of itself. Trivially copyable: it travels as it is between processes of one
// program on machines of one kind.
struct Sign {
  std::int32_t rank = 0;
  Phase phase = Phase::kStart;
  std::int64_t step = 0;
  std::int64_t progress = 0;  // grows with every sign of progress
  double usual_seconds = 0;   // as in Activity::Snapshot
  std::int64_t operation_number = -1;
  std::int32_t waiting = 0;  // 1: in this operation, for the other ranks
  std::array<char, 64> host = {};
  std::array<char, 100> operation = {};  // of the group; empty: none yet

  void set_host(std::string_view text);
  void set_operation(std::string_view text);
};

struct Verdict {
  ExitCode code;     // kHang, or kPeer for a rank that has died
  std::string text;  // one line that names rank, machine, step and operation
};

class Watchdog {
 public:
  Watchdog(int num_ranks, WatchdogLimits limits);

  // `now` is in seconds and never decreases.
  void hear(const Sign& sign, double now);
  // The connection to a rank has ended.
  void lose(int rank, double now);
  // The watcher itself did not run for a while: waits start anew.
  void forgive(double now);

  // What became known of lost ranks since the last call, a line for each. It comes a moment after
  // the loss, when the others wait for the lost one: where they wait tells where it was, more
  // exactly than its last sign. Then mpirun or srun ends the job; if not, the verdict does,
  // kLossGrace after the loss.
  std::vector<std::string> news(double now);
  // Empty while all is well.
  std::optional<Verdict> verdict(double now) const;

  static constexpr double kNewsDelay = 0.4, kLossGrace = 3;  // seconds

 private:
  struct Rank {
    std::optional<Sign> sign;  // the last one heard
    double heard = 0;          // when
    double progressed = 0;     // when its progress last grew
    bool lost = false, told = false;
  };
  // What most ranks but `except` wait in (of equals: what was told of the latest step), and who
  // they are.
  struct Wait {
    std::string place;
    std::vector<int> ranks;
  };

  bool is_missed(const Rank& rank) const;
  double limit(const Sign& sign) const;
  Wait most_wait(int except = -1) const;
  std::string last_seen(int rank) const;
  std::string stall(double now) const;

  const WatchdogLimits limits_;
  std::vector<Rank> ranks_;
};

}  // namespace birkhoff
