#include "runtime/run_checkpoints.h"

#include "cluster/base/log.h"
#include "models/model.h"
#include "runtime/metrics.h"
#include "runtime/optimizer.h"
#include "runtime/run_folder.h"

namespace birkhoff {

std::vector<NamedShard> training_shards(Model& model, Optimizer& optimizer, int num_ranks) {
  std::vector<NamedShard> shards;
  for (const Parameter& parameter : model.parameters().list()) {
    shards.push_back(whole_shard(parameter.name, StateKind::kParameter, parameter.value, 0));
  }
  balance_owners(shards, num_ranks);
  for (NamedShard& shard : optimizer.state()) shards.push_back(std::move(shard));
  return shards;
}

RunCheckpoints::RunCheckpoints(CheckpointWriter& writer, CheckpointHeader header,
                               std::vector<NamedShard> shards, RunFolder* folder, Metrics* metrics)
    : writer_(writer),
      header_(std::move(header)),
      shards_(std::move(shards)),
      folder_(folder),
      metrics_(metrics) {}

void RunCheckpoints::save(const TrainState& state) {
  finish();  // notes the commit of the save before, which the writer would only wait for
  save_start_ = Clock::now();
  header_.set_step(state.step);
  header_.set_consumed(state.consumed);
  header_.set_tokens(state.tokens);
  header_.set_skipped(state.skipped);
  header_.set_evaluation_due(state.evaluation_due);
  header_.set_loss_scale(state.loss_scale.value);
  header_.set_loss_scale_steps(state.loss_scale.steps_since);
  if (metrics_ != nullptr) header_.set_metrics_bytes(metrics_->lines_bytes());
  writer_.save(header_, shards_);
  stall_ = Clock::now() - save_start_;
}

void RunCheckpoints::poll() {
  const auto start = Clock::now();
  note(start, writer_.poll().has_value());
}

void RunCheckpoints::finish() {
  const auto start = Clock::now();
  note(start, writer_.finish().has_value());
}

void RunCheckpoints::note(Clock::time_point start, bool committed) {
  const auto now = Clock::now();
  stall_ += now - start;
  if (!committed || folder_ == nullptr) return;
  folder_->note_checkpoint();
  if (metrics_ != nullptr) metrics_->clear_bar();
  log_info("saved step {}: stall {:.1f} ms, written in {:.2f} s", header_.step(),
           std::chrono::duration<double, std::milli>(stall_).count(),
           std::chrono::duration<double>(now - save_start_).count());
}

}  // namespace birkhoff
