// What a run saves and when it is safe: the trainer's view of checkpoints.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/loss_scale.h"
#include "runtime/named_shard.h"

namespace birkhoff {

class Metrics;
class Model;
class Optimizer;
class RunFolder;

// Where a run stands; with parameters and optimizer state all there is to resume from.
struct TrainState {
  std::int64_t step = 0;        // optimizer steps done, skipped ones included
  std::int64_t consumed = 0;    // sequences, over all epochs: the position in the data
  std::int64_t tokens = 0;      // counted targets of the steps that were applied
  std::int32_t skipped = 0;     // skipped steps in a row
  bool evaluation_due = false;  // a signal stopped the run before the evaluation of this step
  LossScale loss_scale;
};

// All parameters (each with one owner) and the optimizer's state, as views of live memory.
std::vector<NamedShard> training_shards(Model& model, Optimizer& optimizer, int num_ranks);

class RunCheckpoints {
 public:
  // header: what does not change (run, config, ranks, corpus, tokenizer). folder and metrics are
  // rank 0's, null on others.
  RunCheckpoints(CheckpointWriter& writer, CheckpointHeader header, std::vector<NamedShard> shards,
                 RunFolder* folder, Metrics* metrics);

  // All three are collective over the world; errors as CheckpointWriter's. When a save is
  // committed, rank 0 logs "saved step N: stall X ms, written in Y s": how long training stood
  // still for it, in all calls together, and the time from its start to its commit.
  void save(const TrainState& state);
  // At each step's border: commits a save that all ranks have written.
  void poll();
  // Waits for a running save.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  // Ends a call that began at `start` and committed the running save or not.
  void note(Clock::time_point start, bool committed);

  CheckpointWriter& writer_;
  CheckpointHeader header_;
  const std::vector<NamedShard> shards_;
  RunFolder* folder_;
  Metrics* metrics_;
  // Of the save that runs.
  Clock::time_point save_start_;
  Clock::duration stall_{};
};

}  // namespace birkhoff
