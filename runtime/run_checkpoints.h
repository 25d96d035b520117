// The trainer's view of checkpoints: a save of the run, and when it is safe.
//
// A checkpoint is committed only if training can resume from its state: its values are finite, and
// so are the gradients computed from it. The gradients are known one step later, while the save is
// being written. If they are not finite the save is dropped, so the newest checkpoint of a
// diverging run predates the divergence.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/tensor_part.h"
#include "runtime/train_state.h"

namespace birkhoff {

class GradBuckets;
class Model;
class Optimizer;
class Reporter;
class RunFolder;

// This rank's part of a model's parameters and statistics, as views of live memory. Owner: rank 0.
std::vector<TensorPart> model_tensors(Model& model);
// The same (with ZeRO stage 3 this rank's slices), and the optimizer's state, each with an owner in
// the world of `num_ranks`, where the ranks of a tensor axis are neighbors (cluster/mesh.h).
// buckets: the model's and the optimizer's.
std::vector<TensorPart> training_parts(Model& model, const GradBuckets& buckets,
                                       Optimizer& optimizer, int num_ranks);

// What the user should do about a diverged run; the end of a message.
std::string cure_of_divergence(std::optional<std::int64_t> newest_checkpoint);

// A trainer's checkpoints. save(), poll() and finish() are collective over the world; their errors
// are CheckpointWriter's. When a save is committed, rank 0 logs "saved step N: stall X ms, written
// in Y s": how long training waited for it, over all calls, and the time from its start to its
// commit.
class RunCheckpoints {
 public:
  // writer: null: nothing is saved. header: the fields that do not change (run, config, ranks,
  // corpus, tokenizer). newest: step of the checkpoint that the run resumes from, if any. folder is
  // rank 0's, null on other ranks. What is passed by pointer or reference must outlive this object.
  // Collective over the world if there are parts.
  RunCheckpoints(CheckpointWriter* writer, ProcessGroup& world, CheckpointHeader header,
                 std::vector<TensorPart> parts, std::optional<std::int64_t> newest,
                 RunFolder* folder, const Reporter& reporter);

  // Checks before training that a save fits on the disk: if not, Error(kStorage), on all ranks,
  // with the sizes. Warns if a save fits but the checkpoints to keep do not. Collective over the
  // world.
  void check_space() const;

  bool saves() const { return writer_ != nullptr; }
  // Starts a save of a state that follows an applied step or is known to be sound; this confirms
  // the previous save. Error(kNumerical), on all ranks, if a value of the state is not finite: no
  // later step can repair that. Error(kStorage) if the disk is too full. FolderLost as
  // require_folder(). Call it only if saves().
  void save(const TrainState& state);
  // FolderLost, on rank 0, if another job has taken the run's folder. Call it before other files
  // are written there. Local.
  void require_folder() const;
  // Confirms the last save: gradients computed from its state are finite. Local; call it on all
  // ranks alike.
  void confirm() { confirmed_ = true; }
  // Call between steps: commits a confirmed save that all ranks have written.
  void poll();
  // Waits for a confirmed save. An unconfirmed save is dropped: its temporary folder is removed at
  // the next start.
  void finish();
  // Step of the newest checkpoint, if any. The same on all ranks. Local.
  std::optional<std::int64_t> newest() const { return newest_; }
  // The same, with the save that is still being written. Local.
  std::optional<std::int64_t> newest_begun() const { return newest_begun_; }
  // Seconds from the start of a save to its commit, of the slowest so far; 0: none. Local.
  double save_seconds() const { return save_seconds_; }
  // The same, or a guess from a save's size if there was none.
  double expected_save_seconds() const;

 private:
  using Clock = std::chrono::steady_clock;
  // Adds the time since `start` to the save's stall; if `committed`, records and logs the commit.
  void note(Clock::time_point start, bool committed);
  // Error(kStorage) unless a save fits on the disk. Returns, on rank 0, the bytes that stay free.
  std::int64_t require_space() const;

  CheckpointWriter* const writer_;
  ProcessGroup& world_;
  CheckpointHeader header_;
  const std::vector<TensorPart> parts_;
  const std::int64_t bytes_;  // of a checkpoint, all ranks' files together
  std::optional<std::int64_t> newest_, newest_begun_;
  RunFolder* folder_;
  const Reporter& reporter_;
  bool confirmed_ = true;  // the last save is confirmed, or there was none
  // Of the running save.
  Clock::time_point save_start_;
  Clock::duration stall_{};
  double save_seconds_ = 0;
};

}  // namespace birkhoff
