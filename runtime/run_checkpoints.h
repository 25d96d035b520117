// What a run saves and when it is safe: the trainer's view of checkpoints.
//
// A checkpoint is committed only of a state to go on from: its values are finite, and gradients
// that were computed from it were, too. The second is known a step later, while the save is being
// written. A save whose next gradients are not finite is dropped, so the newest checkpoint of a
// diverging run is from before the divergence.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/named_shard.h"
#include "runtime/train_state.h"

namespace birkhoff {

class Metrics;
class Model;
class Optimizer;
class RunFolder;

// All parameters (each with one owner) and the optimizer's state, as views of live memory.
std::vector<NamedShard> training_shards(Model& model, Optimizer& optimizer, int num_ranks);

// What a user does about a run that diverged; for the end of a message.
std::string cure_of_divergence(std::optional<std::int64_t> newest_checkpoint);

class RunCheckpoints {
 public:
  // header: what does not change (run, config, ranks, corpus, tokenizer). newest: step of the
  // checkpoint that the run goes on from, if it does. folder and metrics are rank 0's, null on
  // others. Collective over the world.
  RunCheckpoints(CheckpointWriter& writer, Group& world, CheckpointHeader header,
                 std::vector<NamedShard> shards, std::optional<std::int64_t> newest,
                 RunFolder* folder, Metrics* metrics);

  // Whether a save fits on the disk, before training begins: Error(kStorage), on all ranks, with
  // the sizes. Warns where it does but all that is to be kept does not. Collective over the world.
  void check_space() const;

  // save(), poll() and finish() are collective over the world; errors as CheckpointWriter's. When a
  // save is committed, rank 0 logs "saved step N: stall X ms, written in Y s": how long training
  // stood still for it, in all calls together, and the time from its start to its commit.

  // Starts a save, of a state after a step that was applied or that is known to be sound; the save
  // before is confirmed by that. Error(kNumerical), on all ranks, where a value of the state is not
  // finite: no step can repair that. Error(kStorage) where the disk is too full.
  void save(const TrainState& state);
  // Gradients from the state that was saved last are finite. Local; all ranks call it alike.
  void confirm() { confirmed_ = true; }
  // At each step's border: commits a confirmed save that all ranks have written.
  void poll();
  // Waits for a confirmed save. One that is not is dropped: its folder stays aside and is removed
  // at the next start.
  void finish();

  // Step of the newest checkpoint, if there is one. The same on all ranks. Local.
  std::optional<std::int64_t> newest() const { return newest_; }

 private:
  using Clock = std::chrono::steady_clock;
  // Ends a call that began at `start` and committed the running save or not.
  void note(Clock::time_point start, bool committed);
  void check_finite(const TrainState& state) const;
  // Error(kStorage) unless a save fits on the disk. Returns, on rank 0, what is free besides.
  std::int64_t require_space() const;

  CheckpointWriter& writer_;
  Group& world_;
  CheckpointHeader header_;
  const std::vector<NamedShard> shards_;
  const std::int64_t bytes_;  // of a checkpoint, all ranks' files together
  std::optional<std::int64_t> newest_;
  RunFolder* folder_;
  Metrics* metrics_;
  bool confirmed_ = true;  // the save that was begun last, or none was
  // Of the save that runs.
  Clock::time_point save_start_;
  Clock::duration stall_{};
};

}  // namespace birkhoff
