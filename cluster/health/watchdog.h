// The diagnosis of a hanging job, and of the rank to blame, from the statuses that ranks report.
// Uses neither sockets nor clocks: cluster/health/heartbeat.h delivers the statuses.
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

// How long a rank may make no progress, in seconds: `seconds`, or `steps` times the usual time
// between two signs of progress if that is longer. If the usual time is not known:
// `patient_seconds`.
struct WatchdogLimits {
  double seconds = 8;
  double steps = 4;
  double patient_seconds = 900;
};

// The status that a rank reports about itself: its activity, and what it communicates. Trivially
// copyable: it is sent as raw bytes between processes of the same program on machines of the same
// kind.
struct RankStatus : Activity::Snapshot {
  std::int32_t rank = 0;
  std::int64_t progress = 0;  // grows with every sign of progress: ticks and operations
  std::int64_t operation_number = -1;
  std::int32_t waiting = 0;  // 1: waits in this operation for the other ranks
  std::array<char, 64> host = {};
  std::array<char, 100> operation = {};  // of the group; empty: none yet

  void set_host(std::string_view text);
  void set_operation(std::string_view text);
};

struct Diagnosis {
  ExitCode code;     // kHang, or kPeer for a rank that has died
  std::string text;  // one line that names rank, machine, step and operation
};

class Watchdog {
 public:
  Watchdog(int num_ranks, WatchdogLimits limits);

  // `now` is in seconds and never decreases.
  void on_heartbeat(const RankStatus& status, double now);
  // Call when the connection to `rank` has ended.
  void on_disconnect(int rank, double now);
  // Call when the watching process itself was stopped for a while: all waiting times start again.
  void reset(double now);

  // New warnings since the last call, one line for each lost rank. A warning comes kWarningDelay
  // after the loss. By then the other ranks wait for the lost rank. The operation in which they
  // wait locates the loss more precisely than the lost rank's last status. Usually mpirun or srun
  // then ends the job. If neither does, diagnosis() reports the loss, kLossGrace after it happened.
  std::vector<std::string> warnings(double now);
  // nullopt while all is well.
  std::optional<Diagnosis> diagnosis(double now) const;

  static constexpr double kWarningDelay = 0.4, kLossGrace = 3;  // seconds

 private:
  struct Rank {
    std::optional<RankStatus> status;  // the last one received
    double heard = 0;                  // when it was received, or when the rank was lost
    double progressed = 0;             // when its progress last grew
    bool lost = false, reported = false;
  };
  // The operation in which most ranks wait, and these ranks. Rank `except` does not count. If
  // several operations have equally many ranks, the one with the latest step.
  struct Wait {
    std::string place;
    std::vector<int> ranks;
  };

  bool is_missed(const Rank& rank) const;
  double limit(const RankStatus& status) const;
  Wait most_wait(int except = -1) const;
  std::string last_seen(const RankStatus& status) const;
  std::string loss(const RankStatus& status) const;  // of a lost rank
  std::string stall(double now) const;

  const WatchdogLimits limits_;
  std::vector<Rank> ranks_;
};

}  // namespace birkhoff
