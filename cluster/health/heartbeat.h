// Heartbeats beside the training: every rank has a thread that tells rank 0 over TCP, four times
// a second, what its rank is doing, and hears in return that rank 0 lives. Rank 0's thread gives
// the signs to the watchdog (cluster/health/watchdog.h). TCP and not MPI, because MPI is what may
// hang.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cluster/base/activity.h"
#include "cluster/base/collectives/group.h"
#include "cluster/health/watchdog.h"
#include "cluster/world.h"

namespace birkhoff {

// What this rank tells: its activity, and the operation of `groups` that it waits in, else the last
// one of the last group that had any. Thread-safe.
Sign make_sign(const World& world, const Activity& activity,
               const std::vector<const Group*>& groups);

class Heartbeat {
 public:
  // Starts this rank's thread. `sign` tells what this rank is doing and must be thread-safe;
  // `alarm` is called by the thread, at most once, and should end the job. A rank that cannot reach
  // rank 0 trains unwatched, with a warning. Does nothing where limits.seconds is 0. Collective
  // over the world.
  Heartbeat(Group& world, const WatchdogLimits& limits, std::function<Sign()> sign,
            std::function<void(const Verdict&)> alarm);
  // Says goodbye, so that nobody misses this rank. Local; takes at most a second.
  ~Heartbeat();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace birkhoff
