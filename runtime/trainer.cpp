#include "runtime/trainer.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cluster/base/error.h"
#include "cluster/base/log.h"
#include "configs/config.pb.h"
#include "runtime/grad_norm.h"
#include "runtime/schedule.h"

namespace birkhoff {
namespace {

// Layout of the tail, the sums that are reduced together with the gradients.
enum TailIndex : std::int64_t {
  kTailCount,      // counted targets
  kTailNats,       // their loss
  kTailStop,       // ranks that received a signal
  kTailNonFinite,  // from here on one element a rank: its losses that were not finite
};

bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

}  // namespace

Trainer::Trainer(TrainerParts parts)
    : parts_(std::move(parts)),
      tail_(at::zeros({kTailNonFinite + parts_.group.size()}, at::kDouble)) {}

Outcome Trainer::run(TrainState& state) {
  const configs::Config& config = parts_.config;
  if (state.evaluation_due) evaluate(state);
  while (state.step < config.train().steps()) {
    const StepResult result = step(state);
    if (parts_.metrics != nullptr) parts_.metrics->step(result.report, result.tokens);

    // A step's border: all ranks are here, at the same step.
    const bool last = state.step == config.train().steps();
    const bool stop = result.stop_requested && !last;
    if (parts_.checkpoints != nullptr) parts_.checkpoints->poll();
    // Whoever asks to stop gives little time: an evaluation is left to the resumed run.
    state.evaluation_due = last || is_due(state.step, config.evaluate().every());
    if (!stop && state.evaluation_due) evaluate(state);
    if (parts_.checkpoints != nullptr &&
        (last || stop || is_due(state.step, config.checkpoint().every()))) {
      parts_.checkpoints->save(state);
    }
    if (stop) {
      if (parts_.checkpoints != nullptr) parts_.checkpoints->finish();
      log_info("a signal asked to stop: saved at step {}", state.step);
      return Outcome::kRequeue;
    }
  }
  if (parts_.checkpoints != nullptr) parts_.checkpoints->finish();
  return Outcome::kDone;
}

Trainer::StepResult Trainer::step(TrainState& state) {
  const auto start = std::chrono::steady_clock::now();
  const configs::Train& train = parts_.config.train();
  ++state.step;

  // Batch: this rank's sequences, cut into micro-batches.
  const Batch batch = parts_.next_batch();
  const std::int64_t micro_batch = train.micro_batch() > 0 ? train.micro_batch() : batch.size();
  scalars_.set_noise_step(state.step);
  parts_.buckets.zero();
  tail_.zero_();

  for (std::int64_t begin = 0; begin < batch.size(); begin += micro_batch) {
    const std::int64_t end = std::min(begin + micro_batch, batch.size());
    const Batch micro = batch.narrow(begin, end);

    // Forward: the loss is a sum, so that sums over micro-batches and ranks need no weights.
    const NoiseKey noise{train.seed(), scalars_.noise_step(), 0, micro.sample_ids_B};
    const ObjectiveSums sums = parts_.model.objective(micro, noise);
    add_to_tail(sums);

    // Backward: gradients add up in the buckets; in the last pass each full bucket leaves at once.
    if (end == batch.size()) parts_.buckets.start_reducing();
    sums.loss.backward();
  }

  // Reduce: sums of gradients and counts over all ranks, the same bits on each.
  if (parts_.signals.received() != 0) tail_[kTailStop].fill_(1);
  parts_.buckets.finish_reducing(tail_);
  const double* sums = tail_.const_data_ptr<double>();
  const double count = std::max(sums[kTailCount], 1.0);

  // Clip: one factor divides by the count and bounds the norm of the mean gradient.
  const double norm = gradient_norm(parts_.buckets) / count;
  const bool clipped = train.clip_norm() > 0 && norm > train.clip_norm();
  const double clip_factor = clipped ? train.clip_norm() / norm : 1.0;
  const bool finite =
      std::isfinite(norm) &&
      std::all_of(sums + kTailNonFinite, sums + tail_.size(0), [](double n) { return n == 0; });

  // Update: with kApply 0 parameters and optimizer state stay as they are.
  const double rate = learning_rate(train.schedule(), state.step, train.steps());
  scalars_.set(StepScalars::kLearningRate, rate);
  scalars_.set(StepScalars::kGradientScale, clip_factor / count);
  scalars_.set(StepScalars::kApply, finite ? 1 : 0);
  parts_.optimizer.step(scalars_);

  // Report.
  const auto num_tokens = std::llround(sums[kTailCount]);
  state.consumed += train.global_batch();
  if (finite) {
    state.tokens += num_tokens;
    state.skipped = 0;
  } else {
    count_skipped(state, norm);
  }
  StepResult result;
  result.stop_requested = sums[kTailStop] > 0;
  result.tokens = num_tokens;
  result.report.step = state.step;
  result.report.loss = sums[kTailNats] / count;
  result.report.tokens = state.tokens;
  result.report.learning_rate = rate;
  result.report.grad_norm = norm;
  result.report.step_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return result;
}

void Trainer::add_to_tail(const ObjectiveSums& sums) {
  tail_[kTailCount] += sums.count;
  tail_[kTailNats] += sums.nats;
  tail_[kTailNonFinite + parts_.group.rank()] += at::isfinite(sums.loss.detach()).logical_not();
}

// Every rank sees the same sums, so every rank comes to the same decision.
void Trainer::count_skipped(TrainState& state, double norm) const {
  ++state.skipped;
  std::string where;
  for (int rank = 0; rank < parts_.group.size(); ++rank) {
    if (tail_.const_data_ptr<double>()[kTailNonFinite + rank] > 0) {
      where += fmt::format("{}{}", where.empty() ? "loss of rank " : ", ", rank);
    }
  }
  if (where.empty()) where = fmt::format("gradient norm ({}) while all losses are finite", norm);
  const configs::Train& train = parts_.config.train();
  if (train.non_finite() == configs::Train::stop || state.skipped >= train.max_skipped()) {
    if (parts_.checkpoints != nullptr) parts_.checkpoints->finish();  // the save that still runs
    fail(
        ExitCode::kNumerical,
        "step {}: not finite: {}; {} in a row, and train.non_finite = {}, train.max_skipped = {} "
        "say stop. The last checkpoint is kept; lower train.schedule.learning_rate and start again",
        state.step, where, state.skipped, configs::Train::NonFinite_Name(train.non_finite()),
        train.max_skipped());
  }
  if (parts_.metrics != nullptr) parts_.metrics->clear_bar();
  if (parts_.group.rank() == 0) {
    log_warning("step {}: not finite: {}; skipped ({} in a row)", state.step, where, state.skipped);
  }
}

void Trainer::evaluate(TrainState& state) {
  state.evaluation_due = false;
  if (parts_.evaluator == nullptr) return;
  const Evaluation evaluation = parts_.evaluator->run();
  if (parts_.metrics != nullptr) {
    parts_.metrics->evaluation(state.step, parts_.evaluator->plan().split, evaluation);
  }
}

}  // namespace birkhoff
