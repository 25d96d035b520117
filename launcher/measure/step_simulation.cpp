#include "launcher/measure/step_simulation.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <limits>
#include <vector>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class Simulation {
 public:
  Simulation(const StepSchedule& schedule, const MeshShape& mesh, const NodeLinks& links)
      : schedule_(schedule),
        mesh_(mesh),
        links_(links),
        finished_(schedule.operations.size(), kNever) {}

  SimulatedStep run() {
    SimulatedStep step;
    for (const ScheduledEvent& event : schedule_.events) {
      switch (event.kind) {
        case ScheduledEvent::Kind::kCompute:
          step.computation += event.amount;
          now_ += event.amount;
          break;
        case ScheduledEvent::Kind::kStart:
          run_phases(now_);
          enqueue(event.operation);
          break;
        case ScheduledEvent::Kind::kWait:
          if (finished_[event.operation] == kNever) run_phases(kNever, event.operation);
          require(finished_[event.operation] < kNever, "a wait for an operation that has started");
          now_ = std::max(now_, finished_[event.operation]);
          break;
      }
    }
    step.seconds = now_;
    return step;
  }

 private:
  struct Running {
    std::size_t operation;
    std::vector<TransferPhase> phases;  // those left, the next one last
    double ready;                       // when the next one may begin
  };
  struct Queue {
    std::deque<Running> operations;
    double free = 0;  // when the last operation has finished
  };

  void enqueue(std::size_t operation) {
    const ScheduledOperation& each = schedule_.operations[operation];
    const auto group = static_cast<std::size_t>(each.group);
    Queue& queue = queues_[group];
    std::vector<TransferPhase> phases = phases_of(each, mesh_[group], links_.ranks_per_node);
    std::ranges::reverse(phases);
    queue.operations.push_back({operation, std::move(phases), now_});
  }

  // Runs the phases that may begin before `until`, in the order in which they may, or until
  // `operation` has finished.
  void run_phases(double until, std::size_t operation = std::numeric_limits<std::size_t>::max()) {
    for (;;) {
      Queue* next = nullptr;
      double begin = kNever;
      for (Queue& queue : queues_) {
        if (queue.operations.empty()) continue;
        const double ready = std::max(queue.operations.front().ready, queue.free);
        if (ready < begin) {
          begin = ready;
          next = &queue;
        }
      }
      if (next == nullptr || begin > until) return;
      Running& running = next->operations.front();
      const double end = running.phases.empty() ? begin : end_of(running.phases.back(), begin);
      if (!running.phases.empty()) running.phases.pop_back();
      running.ready = end;
      if (!running.phases.empty()) continue;
      next->free = finished_[running.operation] = end;
      const bool waited_for = running.operation == operation;
      next->operations.pop_front();
      if (waited_for) return;
    }
  }

  double end_of(const TransferPhase& phase, double begin) {
    const bool leaves = phase.between_bytes > 0;
    begin += phase.rounds * (leaves ? links_.between.latency : links_.inside.latency);
    double end = begin + phase.inside_bytes / links_.inside.bytes_per_second;
    if (leaves) {
      between_free_ = std::max(between_free_, begin) +
                      phase.between_bytes * links_.ranks_per_node / links_.between.bytes_per_second;
      end = std::max(end, between_free_);
    }
    return end;
  }

  const StepSchedule& schedule_;
  const MeshShape& mesh_;
  const NodeLinks& links_;
  std::array<Queue, kNumGroupKinds> queues_;
  std::vector<double> finished_;  // when each operation has; kNever: it has not
  double now_ = 0;                // of the computing thread
  double between_free_ = 0;       // when the link to other nodes is
};

}  // namespace

SimulatedStep simulate(const StepSchedule& schedule, const MeshShape& mesh,
                       const NodeLinks& links) {
  return Simulation(schedule, mesh, links).run();
}

}  // namespace birkhoff
