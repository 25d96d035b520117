// The schedule of a training step: what a rank of a mesh does, as far as other ranks notice. It
// computes, starts operations of its groups, and waits for them. Schedules are recorded from a step
// of one rank whose peers are imitated (imitated_rank.h), on the CPU or on LibTorch's meta device.
// All ranks do the same up to a sequence, so a schedule can be counted, simulated for any links
// (step_simulation.h) and replayed on real groups (launcher/bench/step_replay.h). Local.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/two_levels.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

enum class Collective { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast };

// The name of the method of ProcessGroup.
const char* collective_name(Collective what);

// The groups of a rank (cluster/mesh.h).
enum class GroupKind { kWorld, kData, kTensor, kInsideNodes, kAcrossNodes };
inline constexpr std::size_t kNumGroupKinds = 5;

struct GroupShape {
  NodeRanks ranks{.rank = 0, .size = 1, .node_ranks = 1};
  int stride = 1;          // between the world's ranks of neighbors in the group
  bool on_gpus = false;    // NcclGroup; else MpiGroup
  bool ring_sums = false;  // mesh.nccl_reductions
};

// The groups of rank 0, by GroupKind.
using MeshShape = std::array<GroupShape, kNumGroupKinds>;
// check_axes() of the configuration's mesh must have passed.
MeshShape mesh_shape(const configs::Config& config, int num_ranks);

struct ScheduledOperation {
  GroupKind group = GroupKind::kData;
  Collective what = Collective::kAllReduce;
  std::string purpose{};         // "gradients", "values", ...
  std::int64_t input_bytes = 0;  // as OperationRing counts them
  std::int64_t bytes = 0;        // of the longer one of input and output
  std::int64_t element_bytes = 4;
  bool caller_waits = false;  // before it does anything else
};

enum class StepPart { kForward, kBackward, kUpdate };

struct ScheduledEvent {
  enum class Kind { kCompute, kStart, kWait };
  Kind kind = Kind::kCompute;
  StepPart part = StepPart::kForward;
  double amount = 0;          // kCompute: seconds, or what the recorder's clock counts
  std::size_t operation = 0;  // kStart, kWait: number of the operation
};

struct StepSchedule {
  std::vector<ScheduledOperation> operations;
  std::vector<ScheduledEvent> events;

  // The computation of a part.
  double amount(StepPart part) const;
  // Stretches the computation of a part to `seconds`. A part without any gets it at its end.
  void scale(StepPart part, double seconds);
};

// A transfer between all ranks of a group, at once or in rounds, of bytes that a rank sends, on
// average: to ranks of its node, and to others.
struct TransferPhase {
  double inside_bytes = 0, between_bytes = 0;
  int rounds = 1;
};
// What the group does to run an operation. Nodes hold ranks_per_node of the world's ranks.
std::vector<TransferPhase> phases_of(const ScheduledOperation& operation, const GroupShape& shape,
                                     int ranks_per_node);

// Operations with one purpose.
struct Exchange {
  std::string what;
  GroupKind group = GroupKind::kData;
  std::int64_t operations = 0;
  std::int64_t bytes = 0;  // of this rank's inputs
  double sent_bytes = 0;   // to other ranks, on average over the ranks
  double sent_to_other_nodes = 0;
};
// The operations of a schedule by purpose and group, in the order of their first ones.
std::vector<Exchange> exchanges_of(const StepSchedule& schedule, const MeshShape& mesh,
                                   int ranks_per_node);

// Records a schedule. Imitated groups call start() and go_on(), and wait for what start() returns.
class StepRecorder {
 public:
  // clock: what has been computed so far, in any unit.
  explicit StepRecorder(std::function<double()> clock) : clock_(std::move(clock)) { restart(); }

  void restart();
  // The part that begins now.
  void begin(StepPart part);
  // Ends the computation before the operation.
  std::unique_ptr<Work> start(ScheduledOperation operation);
  // Computation goes on. What was done since start() stands for the operation and does not count.
  void go_on() { last_ = clock_(); }
  // The schedule since restart().
  StepSchedule finish();

 private:
  class RecordedWait;
  void add_computation();

  const std::function<double()> clock_;
  StepSchedule schedule_;
  StepPart part_ = StepPart::kForward;
  double last_ = 0;
};

}  // namespace birkhoff
