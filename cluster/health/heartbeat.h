// Heartbeats during training. A thread on every rank reports the rank's status to rank 0 over TCP
// four times a second; the replies show that rank 0 is alive. Rank 0's thread passes the statuses
// to the watchdog (cluster/health/watchdog.h), and warns of slow ranks
// (cluster/health/slow_ranks.h). TCP rather than MPI, because MPI is what may hang.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cluster/base/activity.h"
#include "cluster/base/collectives/process_group.h"
#include "cluster/health/slow_ranks.h"
#include "cluster/health/watchdog.h"
#include "cluster/world.h"

namespace birkhoff {

// This rank's status: its activity, and the operation of `groups` that it waits in, or else the
// last operation of the last group that has any. Thread-safe.
RankStatus make_status(const World& world, const Activity& activity,
                       const std::vector<const ProcessGroup*>& groups);

class Heartbeat {
 public:
  // Starts this rank's thread. `status` returns what this rank is doing and must be thread-safe.
  // The thread calls `alarm` at most once; `alarm` should end the job. A rank that cannot reach
  // rank 0 logs a warning and trains unwatched. Rank 0's thread logs a warning for each slow rank
  // and calls `on_slow_rank`, if it is not empty. Does nothing if limits.seconds is 0. Collective
  // over the world.
  Heartbeat(ProcessGroup& world, const WatchdogLimits& limits, std::function<RankStatus()> status,
            std::function<void(const Diagnosis&)> alarm,
            std::function<void(const SlowRank&)> on_slow_rank = {});
  // Says goodbye, so that no watchdog takes this rank for lost. Local; takes at most a second.
  ~Heartbeat();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace birkhoff
