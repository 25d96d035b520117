#include "runtime/trainer.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cluster/base/error.h"
#include "cluster/base/log.h"
#include "cluster/base/number_text.h"
#include "configs/config.pb.h"
#include "runtime/grad_norm.h"
#include "runtime/schedule.h"
#include "runtime/shard_tree.h"

namespace birkhoff {
namespace {

// Layout of the tail, the sums that are reduced together with the gradients: a row of these for
// each virtual shard, one row where there are none.
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
      scalars_(parts_.group.device()),
      tail_(at::zeros({std::max(1, parts_.config.train().invariant().shards()),
                       kTailNonFinite + parts_.group.size()},
                      at::TensorOptions(at::kDouble).device(parts_.group.device()))),
      gradients_graph_(parts_.config.train().cuda_graph(), parts_.group.device()),
      // With slices ranks exchange their borders.
      norm_graph_(parts_.config.train().cuda_graph() && !parts_.buckets.sliced(),
                  parts_.group.device()),
      update_graph_(parts_.config.train().cuda_graph(), parts_.group.device()) {}

bool Trainer::GradientSums::finite() const { return losses_finite && std::isfinite(norm); }

Outcome Trainer::run(TrainState& state) {
  const configs::Config& config = parts_.config;
  if (state.evaluation_due) evaluate(state);
  if (state.step >= config.train().steps()) return end(state, false, find_divergence(state));
  for (bool save_due = false;;) {
    enter(Phase::kStep, state.step + 1);
    const StepResult result = step(state);
    if (parts_.metrics != nullptr) {
      parts_.metrics->step(result.report, result.tokens);
    } else if (parts_.step_log != nullptr) {
      parts_.step_log->step(result.report, result.tokens);
    }

    // A step's border: all ranks are here, at the same step.
    const bool last = state.step == config.train().steps();
    const bool stop = result.stop_requested && !last;
    if (parts_.checkpoints != nullptr) {
      if (result.applied) parts_.checkpoints->confirm();
      parts_.checkpoints->poll();
    }
    // Whoever asks to stop gives little time: an evaluation is left to the resumed run.
    state.evaluation_due = last || is_due(state.step, config.evaluate().every());
    if (!stop && state.evaluation_due) evaluate(state);
    const std::string divergence = last || stop ? find_divergence(state) : "";
    // A save whose step is skipped waits for the next step that is not.
    save_due |= is_due(state.step, config.checkpoint().every());
    const bool save = parts_.checkpoints != nullptr &&
                      (last || stop ? divergence.empty() : save_due && result.applied);
    if (save || is_due(state.step, config.agreement().every())) {
      if (!ranks_agree(state)) return Outcome::kRestore;
    }
    if (save) {
      enter(Phase::kSave, state.step);
      parts_.checkpoints->save(state);
      save_due = false;
    }
    if (last || stop) return end(state, stop, divergence);
  }
}

Outcome Trainer::end(const TrainState& state, bool stop, const std::string& divergence) {
  if (parts_.checkpoints != nullptr) {
    if (divergence.empty()) parts_.checkpoints->confirm();
    parts_.checkpoints->finish();
  }
  if (!stop && !divergence.empty()) {
    fail(ExitCode::kNumerical, "step {}: training ends, but {}: not saved. {}", state.step,
         divergence, cure());
  }
  if (!stop) return Outcome::kDone;
  if (divergence.empty()) {
    log_info("a signal asked to stop: saved at step {}", state.step);
  } else if (parts_.group.rank() == 0) {
    log_warning("a signal asked to stop at step {}: not saved, because {}. {}", state.step,
                divergence, cure());
  }
  return Outcome::kRequeue;
}

Trainer::StepResult Trainer::step(TrainState& state) {
  const auto start = std::chrono::steady_clock::now();
  const configs::Train& train = parts_.config.train();
  ++state.step;
  state.held_out_loss.reset();
  const double waited_ms = parts_.feed.waited_ms();
  batch_ = parts_.feed.next();
  if (train.cuda_graph()) batch_ = fixed_batch_.hold(*batch_);
  const GradientSums sums = sum_gradients(state.step, state.loss_scale);
  const double* tail = sums.tail.const_data_ptr<double>();

  // Clip: one factor divides by count and loss scale and bounds the norm of the mean gradient.
  const double scale = state.loss_scale.value;
  const bool clipped = train.clip_norm() > 0 && sums.norm > train.clip_norm();
  const double clip_factor = clipped ? train.clip_norm() / sums.norm : 1.0;

  // Update: with kApply 0 parameters and optimizer state stay as they are.
  const double rate = learning_rate(train.schedule(), state.step, train.steps());
  scalars_.set(StepScalars::kLearningRate, rate);
  scalars_.set(StepScalars::kGradientScale, clip_factor / sums.count / scale);
  scalars_.set(StepScalars::kApply, sums.finite() ? 1 : 0);
  scalars_.publish();
  update_graph_.run([this] { parts_.optimizer.step(scalars_); });
  parts_.buckets.publish_values();

  // Report.
  const auto num_tokens = std::llround(tail[kTailCount]);
  state.consumed += train.global_batch();
  if (sums.finite()) {
    state.tokens += num_tokens;
    state.skipped = 0;
    if (train.precision() == configs::Train::fp16) state.loss_scale.keep();
  } else if (scale_overflows(sums, state.loss_scale)) {
    state.loss_scale.shrink();
    if (parts_.metrics != nullptr) parts_.metrics->clear_bar();
    if (parts_.group.rank() == 0) {
      log_info("step {}: gradients overflow fp16 with the loss scale {}: skipped, now {}",
               state.step, scale, state.loss_scale.value);
    }
  } else {
    count_skipped(state, sums);
  }
  StepResult result;
  result.applied = sums.finite();
  result.stop_requested = tail[kTailStop] > 0;
  result.tokens = num_tokens;
  result.report.step = state.step;
  result.report.loss = tail[kTailNats] / sums.count;
  result.report.tokens = state.tokens;
  result.report.learning_rate = rate;
  result.report.grad_norm = sums.norm;
  result.report.loader_wait_ms = parts_.feed.waited_ms() - waited_ms;
  result.report.step_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return result;
}

Trainer::GradientSums Trainer::sum_gradients(std::int64_t step, const LossScale& scale) {
  // Forward, backward.
  scalars_.set_noise_step(step);
  scalars_.set(StepScalars::kLossScale, scale.value);
  scalars_.publish();
  gradients_graph_.run([this] { compute_gradients(*batch_); });
  parts_.feed.prefetch();

  // Reduce: sums of gradients and counts over all ranks, the same bits on each.
  if (parts_.signals.received() != 0) tail_[0][kTailStop].fill_(1);
  parts_.buckets.finish_reducing(tail_);
  norm_graph_.run([this] { block_sums_ = gradient_block_sums(parts_.buckets); });
  GradientSums sums;
  sums.tail = tail_sums();
  const double* tail = sums.tail.const_data_ptr<double>();
  sums.count = std::max(tail[kTailCount], 1.0);
  sums.norm = norm_of_block_sums(parts_.buckets, block_sums_) / sums.count / scale.value;
  sums.losses_finite =
      std::all_of(tail + kTailNonFinite, tail + sums.tail.size(0), [](double n) { return n == 0; });
  return sums;
}

bool Trainer::scale_overflows(const GradientSums& sums, const LossScale& scale) const {
  return parts_.config.train().precision() == configs::Train::fp16 && sums.losses_finite &&
         scale.may_overflow();
}

void Trainer::compute_gradients(const Batch& batch) {
  const configs::Train& train = parts_.config.train();
  const std::int64_t micro_batch = train.micro_batch() > 0 ? train.micro_batch() : batch.size();
  parts_.buckets.zero();
  tail_.zero_();
  // This rank's sequences, cut into micro-batches.
  for (const ShardRows& shard : shards_of_batch(batch.size())) {
    if (shard.rows.begin > 0) {
      parts_.buckets.next_shard(/*one_pass=*/shard.rows.size() <= micro_batch);
    }
    for (std::int64_t begin = shard.rows.begin; begin < shard.rows.end; begin += micro_batch) {
      const std::int64_t end = std::min(begin + micro_batch, shard.rows.end);
      const Batch micro = batch.narrow(begin, end);

      // Forward: the loss is a sum, so that sums over micro-batches and ranks need no weights.
      const NoiseKey noise{train.seed(), scalars_.noise_step(), 0, micro.sample_ids_B};
      const ObjectiveSums sums = parts_.model.objective(micro, noise);
      add_to_tail(shard.tail_row, sums);

      // Backward: gradients add up in the buckets; in the last pass each full bucket leaves at
      // once. From inside a graph nothing is sent: finish_reducing() does it.
      if (end == batch.size() && !train.cuda_graph()) parts_.buckets.start_reducing();
      sums.loss.backward(scalars_.loss_scale(sums.loss.scalar_type()));
      if (parts_.activity != nullptr) parts_.activity->tick();
    }
  }
}

std::vector<Trainer::ShardRows> Trainer::shards_of_batch(std::int64_t batch_size) const {
  const configs::Train& train = parts_.config.train();
  const std::int64_t num_shards = train.invariant().shards();
  if (num_shards == 0) return {{{0, batch_size}, 0}};
  std::vector<ShardRows> shards;
  const Interval mine = part_of(num_shards, parts_.group.rank(), parts_.group.size());
  const std::int64_t first = part_of(train.global_batch(), mine.begin, num_shards).begin;
  for (std::int64_t shard = mine.begin; shard < mine.end; ++shard) {
    const Interval places = part_of(train.global_batch(), shard, num_shards);
    shards.push_back({{places.begin - first, places.end - first}, shard});
  }
  return shards;
}

void Trainer::add_to_tail(std::int64_t row, const ObjectiveSums& sums) {
  const at::Tensor tail = tail_[row];
  tail[kTailCount] += sums.count;
  tail[kTailNats] += sums.nats;
  tail[kTailNonFinite + parts_.group.rank()] += at::isfinite(sums.loss.detach()).logical_not();
}

// Rows of virtual shards are added along the tree that their gradients are added along.
at::Tensor Trainer::tail_sums() const {
  ShardSum sum(tail_.size(0));
  for (std::int64_t row = 0; row < tail_.size(0); ++row) sum.add({row, row + 1}, tail_[row]);
  return sum.sums().front().cpu();
}

// Every rank sees the same sums, so every rank comes to the same decision.
void Trainer::count_skipped(TrainState& state, const GradientSums& sums) const {
  ++state.skipped;
  const std::string what = describe_non_finite(sums);
  const configs::Train& train = parts_.config.train();
  if (train.non_finite() == configs::Train::stop || state.skipped >= train.max_skipped()) {
    if (parts_.checkpoints != nullptr) parts_.checkpoints->finish();  // the save that still runs
    fail(ExitCode::kNumerical,
         "step {}: not finite: {}; {} in a row, and train.non_finite = {}, train.max_skipped = {} "
         "say stop. {}",
         state.step, what, state.skipped, configs::Train::NonFinite_Name(train.non_finite()),
         train.max_skipped(), cure());
  }
  if (parts_.metrics != nullptr) parts_.metrics->clear_bar();
  if (parts_.group.rank() == 0) {
    log_warning("step {}: not finite: {}; skipped ({} in a row)", state.step, what, state.skipped);
  }
}

std::string Trainer::describe_non_finite(const GradientSums& sums) const {
  const double* tail = sums.tail.const_data_ptr<double>();
  std::string ranks;
  for (int rank = 0; rank < parts_.group.size(); ++rank) {
    if (tail[kTailNonFinite + rank] > 0) {
      ranks += fmt::format("{}{}", ranks.empty() ? "loss of rank " : ", ", rank);
    }
  }
  if (!ranks.empty()) return ranks;
  return fmt::format("gradient norm ({}) while all losses are finite", fixed_text(sums.norm, 3));
}

std::string Trainer::find_divergence(const TrainState& state) {
  if (state.skipped > 0) {
    return fmt::format(
        "its last {} skipped as not finite",
        state.skipped == 1 ? "step was" : fmt::format("{} steps were", state.skipped));
  }
  if (state.held_out_loss && !std::isfinite(*state.held_out_loss)) {
    return fmt::format("the loss of its evaluation is {}", fixed_text(*state.held_out_loss, 4));
  }
  if (parts_.checkpoints == nullptr || !batch_) return "";
  // The same sequences once more: a batch that cannot be read must not keep the run from saving.
  enter(Phase::kSave, state.step);
  const GradientSums sums = sum_gradients(state.step + 1, state.loss_scale);
  if (sums.finite() || scale_overflows(sums, state.loss_scale)) return "";
  return fmt::format("what its parameters compute is not finite: {}", describe_non_finite(sums));
}

std::string Trainer::cure() const {
  return cure_of_divergence(parts_.checkpoints != nullptr ? parts_.checkpoints->newest()
                                                          : std::nullopt);
}

void Trainer::evaluate(TrainState& state) {
  state.evaluation_due = false;
  if (parts_.evaluator == nullptr) return;
  enter(Phase::kEvaluate, state.step);
  const Evaluation evaluation = parts_.evaluator->run([this] {
    if (parts_.activity != nullptr) parts_.activity->tick();
  });
  state.held_out_loss = evaluation.loss;
  if (parts_.metrics != nullptr) {
    parts_.metrics->evaluation(state.step, parts_.evaluator->plan().split, evaluation);
  }
}

bool Trainer::ranks_agree(const TrainState& state) {
  if (parts_.agreement == nullptr) return true;
  const std::string difference = parts_.agreement->find_difference(state);
  if (difference.empty()) return true;
  if (parts_.metrics != nullptr) parts_.metrics->clear_bar();
  if (parts_.checkpoints != nullptr) parts_.checkpoints->finish();  // the save that still runs
  constexpr const char* kCure =
      "memory, processor or network of a machine is unsound: test the machines, leave the unsound "
      "one out";
  if (parts_.config.agreement().on_difference() == configs::Agreement::stop) {
    fail(ExitCode::kNumerical,
         "step {}: {}; {}, and start the same command again: the last checkpoint is from before "
         "(agreement.on_difference = restore would go on from it)",
         state.step, difference, kCure);
  }
  if (parts_.group.rank() == 0) {
    log_warning("step {}: {}; {}; goes back to the last checkpoint", state.step, difference, kCure);
  }
  return false;
}

void Trainer::enter(Phase phase, std::int64_t step) {
  if (parts_.activity != nullptr) parts_.activity->enter(phase, step);
}

}  // namespace birkhoff
