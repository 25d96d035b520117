// The time of a step on given links, from a schedule (step_schedule.h). The model:
// - All ranks compute for the same time and start operations together.
// - A group runs its operations one after another; groups run at the same time.
// - A phase of an operation takes its rounds times the latency, and then the time of its bytes. The
//   ranks of a node share its link to other nodes, in the order in which phases become ready.
//   Inside a node each rank has a link of its own.
// - Communication takes nothing from computation. Local.
#pragma once

#include <limits>
#include <optional>

#include "launcher/measure/step_schedule.h"

namespace birkhoff {

struct Link {
  double bytes_per_second;  // in each direction; infinite: bytes take no time
  double latency = 0;       // seconds
};

// GB/s (not set: infinitely fast) and microseconds.
inline Link link_of(const std::optional<double>& gbs, double us) {
  return {gbs ? *gbs * 1e9 : std::numeric_limits<double>::infinity(), us * 1e-6};
}

struct NodeLinks {
  int ranks_per_node = 1;
  Link inside;   // of a rank, to the others of its node
  Link between;  // of a node, to other nodes
};

struct SimulatedStep {
  double seconds = 0;
  double computation = 0;  // of it
  double exposed() const { return seconds - computation; }
};

// The computation of `schedule` is in seconds.
SimulatedStep simulate(const StepSchedule& schedule, const MeshShape& mesh, const NodeLinks& links);

}  // namespace birkhoff
