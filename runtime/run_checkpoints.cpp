#include "runtime/run_checkpoints.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"
#include "models/model.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/reporting/reporter.h"

namespace birkhoff {

namespace {

void append(std::vector<TensorPart>& parts, std::vector<TensorPart> more) {
  std::ranges::move(more, std::back_inserter(parts));
}

std::vector<TensorPart> all_of(const std::string& name, StateKind kind, const at::Tensor& value,
                               const TensorPlacement& placement) {
  require(value.is_contiguous(), "parameters and statistics are contiguous");
  return placed_parts(name, kind, placement, {0, value.numel()}, value.detach().view({-1}));
}

std::vector<TensorPart> statistics_of(const Parameters& parameters) {
  std::vector<TensorPart> parts;
  for (const Statistic& statistic : parameters.statistics()) {
    append(parts,
           all_of(statistic.name, StateKind::kStatistic, statistic.value, statistic.placement));
  }
  return parts;
}

}  // namespace

std::vector<TensorPart> model_tensors(Model& model) {
  std::vector<TensorPart> parts;
  for (const Parameter& parameter : model.parameters().list()) {
    append(parts,
           all_of(parameter.name, StateKind::kParameter, parameter.value, parameter.placement));
  }
  append(parts, statistics_of(model.parameters()));
  return parts;
}

std::vector<TensorPart> training_parts(Model& model, const GradBuckets& buckets,
                                       Optimizer& optimizer, int num_ranks) {
  const ModelPlacement& place = model.parameters().place();
  // The ranks of the data axis share the writing of what all of them hold.
  std::vector<TensorPart> parts =
      buckets.values_are_sliced() ? statistics_of(model.parameters()) : model_tensors(model);
  balance_owners(parts, num_ranks / place.tensor_size);
  if (buckets.values_are_sliced()) {
    for (const GradBucket& bucket : buckets.buckets()) {
      for (const GradBucket::Slot& slot : bucket.slots) {
        append(parts, owned_parts(buckets, bucket, slot, slot.name, StateKind::kParameter,
                                  bucket.own_values));
      }
    }
  }
  append(parts, optimizer.state());
  // Owners are data-parallel ranks so far. Of a part that the whole tensor axis holds, its first
  // rank writes.
  for (TensorPart& part : parts) {
    part.owner =
        part.owner * place.tensor_size + (part.region.has_whole_box() ? 0 : place.tensor_rank);
  }
  return parts;
}

namespace {

constexpr double kGuessedBytesPerSecond = 100e6;  // written, and read back

std::int64_t bytes_of_all_ranks(const std::vector<TensorPart>& parts, ProcessGroup& world) {
  if (parts.empty()) return 0;
  const at::Tensor bytes = at::zeros({1}, at::kLong);
  for (const TensorPart& part : parts) {
    if (part.owner == world.rank()) {
      *bytes.mutable_data_ptr<std::int64_t>() += static_cast<std::int64_t>(part.data.nbytes());
    }
  }
  world.all_reduce(bytes, ReduceOp::kSum, "size of a checkpoint");
  return bytes.item<std::int64_t>();
}

std::string size_text(std::int64_t bytes) {
  return bytes < 10'000'000 ? counted(bytes, "byte")
                            : fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

}  // namespace

std::string cure_of_divergence(std::optional<std::int64_t> newest_checkpoint) {
  constexpr const char* kCure = "lower train.schedule.learning_rate and start again";
  return newest_checkpoint
             ? fmt::format("The checkpoint of step {} predates the divergence: {} to resume there",
                           *newest_checkpoint, kCure)
             : fmt::format("No checkpoint predates the divergence: {}", kCure);
}

RunCheckpoints::RunCheckpoints(CheckpointWriter* writer, ProcessGroup& world,
                               CheckpointHeader header, std::vector<TensorPart> parts,
                               std::optional<std::int64_t> newest, RunFolder* folder,
                               const Reporter& reporter)
    : writer_(writer),
      world_(world),
      header_(std::move(header)),
      parts_(std::move(parts)),
      bytes_(bytes_of_all_ranks(parts_, world)),
      newest_(newest),
      newest_begun_(newest),
      folder_(folder),
      reporter_(reporter) {}

double RunCheckpoints::expected_save_seconds() const {
  return save_seconds_ > 0 ? save_seconds_ : static_cast<double>(bytes_) / kGuessedBytesPerSecond;
}

void RunCheckpoints::require_folder() const {
  if (folder_ != nullptr) folder_->lease().require_held();
}

void RunCheckpoints::save(const TrainState& state) {
  confirm();  // this state was computed from the last one saved
  finish();   // records the previous save's commit; writer_->save() would only wait for it
  save_start_ = Clock::now();
  if (folder_ != nullptr) {
    folder_->lease().check();
    header_.set_holder(folder_->lease().number());
  }
  require_space();
  write_state(state, header_);
  header_.set_metrics_bytes(reporter_.metrics_bytes());
  writer_->save(header_, parts_, [&](const std::string& tensor) {
    fail(ExitCode::kNumerical,
         "step {}: {} holds values that are not finite, which no later step can repair: not saved. "
         "{}",
         state.step, tensor, cure_of_divergence(newest_));
  });
  confirmed_ = false;
  newest_begun_ = state.step;
  stall_ = Clock::now() - save_start_;
}

std::int64_t RunCheckpoints::require_space() const {
  std::string problem;
  std::int64_t left = 0;
  if (folder_ != nullptr) {
    const std::string path = folder_->paths().checkpoints().string();
    try {
      const std::int64_t free = free_bytes(path);
      left = free - bytes_;
      if (left < 0) {
        problem = fmt::format(
            "{}: a checkpoint needs {}, and {} are free on that file system: free space there, or "
            "choose another folder for --run",
            path, size_text(bytes_), size_text(free));
      }
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  problem = world_.broadcast_bytes(problem, 0, "space for a checkpoint");
  if (!problem.empty()) fail(ExitCode::kStorage, "{}", problem);
  return left;
}

void RunCheckpoints::check_space() const {
  const std::int64_t left = require_space();
  if (folder_ == nullptr) return;
  // The oldest is removed only after the next is committed: for a moment there is one more than is
  // kept.
  const configs::Checkpoint& config = header_.config().checkpoint();
  const std::int64_t most = std::int64_t{config.keep()} + config.keep_best() + 1;
  const auto present =
      static_cast<std::int64_t>(list_checkpoints(folder_->paths().checkpoints()).size());
  const std::int64_t steps = header_.config().train().steps() - newest_.value_or(0);
  const std::int64_t saves = config.every() > 0 ? steps / config.every() + 1 : 1;
  const std::int64_t further = std::min(most - present, saves) - 1;
  if (further <= 0 || left / std::max<std::int64_t>(bytes_, 1) >= further) return;
  log_warning(
      "{}: the next save fits, but the checkpoints to keep do not: {} of {} each "
      "(checkpoint.keep = {}, and the one being written), and {} are free",
      folder_->paths().checkpoints().string(), counted(most, "checkpoint"), size_text(bytes_),
      config.keep(), size_text(left + bytes_));
}

void RunCheckpoints::poll() {
  if (!saves() || !confirmed_) return;
  const auto start = Clock::now();
  note(start, writer_->poll().has_value());
}

void RunCheckpoints::finish() {
  if (!saves() || !confirmed_) return;
  const auto start = Clock::now();
  note(start, writer_->finish().has_value());
}

void RunCheckpoints::note(Clock::time_point start, bool committed) {
  const auto now = Clock::now();
  stall_ += now - start;
  if (!committed) return;
  newest_ = header_.step();
  const double seconds = std::chrono::duration<double>(now - save_start_).count();
  save_seconds_ = std::max(save_seconds_, seconds);
  if (folder_ == nullptr) return;
  folder_->note_checkpoint();
  log_info("saved step {}: stall {:.1f} ms, written in {:.2f} s", header_.step(),
           std::chrono::duration<double, std::milli>(stall_).count(), seconds);
}

}  // namespace birkhoff
