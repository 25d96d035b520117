// Detection of slow ranks, from the times that ranks report about their steps. All ranks take the
// same time for a step, because they wait for each other; a slow rank is the one that does not
// wait. Uses neither sockets nor clocks: cluster/health/heartbeat.h delivers the statuses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cluster/health/watchdog.h"

namespace birkhoff {

struct SlowRank {
  int rank = 0;
  std::string host;
  std::int64_t step = 0;  // the step it was in
  std::string phase;      // the phase with the largest loss
  double seconds = 0;     // its time for a step, without waiting for other ranks
  double usual = 0;       // the usual time for such a rank

  // One line for users, without the step.
  std::string text() const;
};

class SlowRanks {
 public:
  // A rank is slow if its busy time is above kSlower times the usual one and kMinSeconds above
  // it, without a break over kSteps steps and kMinDuration seconds: in less time another process
  // may take a rank's core for a moment. The usual time is the median over ranks. The times of
  // ranks with fewer sequences than the judged one are scaled up to its number, so that a larger
  // share of the batch is no fault.
  static constexpr double kSlower = 1.2, kMinSeconds = 0.005;
  static constexpr std::int64_t kSteps = 20;
  static constexpr double kMinDuration = 5;

  explicit SlowRanks(int num_ranks) : ranks_(static_cast<std::size_t>(num_ranks)) {}

  // `now` is in seconds and never decreases.
  void on_heartbeat(const RankStatus& status) { ranks_.at(status.rank).status = status; }
  // Ranks that have become slow since the last call. Each is named once, until it has kept the
  // usual speed for kSteps steps.
  std::vector<SlowRank> find(double now);

 private:
  struct Rank {
    std::optional<RankStatus> status;       // the last one
    std::optional<std::int64_t> slow_from;  // RankStatus::num_timed, when it became slow
    std::int64_t last_slow = 0;
    double since = 0;  // the time of slow_from
    bool named = false;
  };

  template <typename Time>
  double usual(const RankStatus& judged, Time time) const;
  SlowRank describe(const RankStatus& status) const;

  std::vector<Rank> ranks_;
};

}  // namespace birkhoff
