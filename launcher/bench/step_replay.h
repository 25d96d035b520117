// Replays the schedule of a step on the groups of a mesh: the same operations on tensors of the
// same size, and for computation a wait of its length. So it shows what a network makes of a step,
// with more ranks than there are cores.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "cluster/mesh.h"
#include "launcher/measure/step_schedule.h"

namespace birkhoff {

class StepReplay {
 public:
  // The mesh's groups must have the shape with which the schedule was recorded. An all_to_all sends
  // equal parts. Everything must outlive the replay.
  StepReplay(const StepSchedule& schedule, Mesh& mesh, World& world)
      : schedule_(schedule), mesh_(mesh), world_(world) {}

  // Seconds of a step on this rank, which begins when all ranks have called it. Collective over the
  // world.
  double run();

 private:
  struct Tensors {  // fp32
    at::Tensor output, input;
  };
  struct Running {
    std::unique_ptr<Work> work;  // null: its caller has waited
    Tensors tensors;
  };
  ProcessGroup& group(const ScheduledOperation& operation);
  // Of an earlier operation of this kind and size that has ended, or new.
  Tensors take_tensors(const ScheduledOperation& operation);
  void give_back(const ScheduledOperation& operation, Tensors tensors);

  const StepSchedule& schedule_;
  Mesh& mesh_;
  World& world_;
  std::map<std::tuple<GroupKind, Collective, std::int64_t>, std::vector<Tensors>> free_;
};

}  // namespace birkhoff
