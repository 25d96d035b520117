#include "runtime/trainer.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {
namespace {

bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

}  // namespace

Trainer::Trainer(TrainerParts parts)
    : parts_(parts),
      step_(parts_.config.train(), parts_.model, parts_.group, parts_.world, parts_.buckets,
            parts_.optimizer, &parts_.activity, parts_.pass_group),
      clock_(parts_.group.device()) {}

Outcome Trainer::run(TrainState& state) {
  const configs::Config& config = parts_.config;
  RunCheckpoints& checkpoints = parts_.checkpoints;
  if (any_asks_to_stop()) return end(state, parts_.stop.why(), "");
  const bool made_up_for = state.evaluation_due;
  if (made_up_for && !evaluate(state)) return end(state, parts_.stop.why(), "");
  if (is_last(state)) {
    const std::string divergence = find_divergence(state, false);
    const bool save = made_up_for && checkpoints.saves() && divergence.empty();
    if (save && !ranks_agree(state)) return Outcome::kRestore;
    if (save) begin_save(state);
    return end(state, "", divergence);
  }
  for (bool save_due = false;;) {
    parts_.activity.enter(Phase::kStep, state.step + 1);
    const StepResult result = step(state);
    if (result.abandoned) {
      const std::optional<Error> unread = any_unread();
      const std::string divergence = find_divergence(state, true);
      const bool save = divergence.empty() && checkpoints.saves() && state.step > 0 &&
                        checkpoints.newest_begun() != state.step;
      if (save && !ranks_agree(state)) return Outcome::kRestore;
      if (save) begin_save(state);
      const Outcome outcome =
          end(state, unread ? "a batch cannot be read" : parts_.stop.why(), divergence);
      if (unread) throw *unread;
      return outcome;
    }
    checkpoints.require_folder();
    parts_.reporter.step(result.report, result.tokens);

    // Between steps: all ranks are here, at the same step.
    const bool all_done = state.step == config.train().steps();
    bool stop = result.stop_requested && !all_done;
    if (result.applied) checkpoints.confirm();
    checkpoints.poll();
    parts_.reporter.saved(checkpoints.newest().value_or(0), checkpoints.save_seconds());
    // A request to stop leaves little time: the resumed run makes the evaluation.
    state.evaluation_due = all_done || is_due(state.step, config.evaluate().every());
    if (!stop && state.evaluation_due) stop = !evaluate(state);
    const bool last = is_last(state);
    const std::string divergence = last || stop ? find_divergence(state, stop) : "";
    // A save that is due at a skipped step waits for the next applied step.
    save_due |= is_due(state.step, config.checkpoint().every());
    const bool save =
        checkpoints.saves() && (last || stop ? divergence.empty() : save_due && result.applied);
    if (save || is_due(state.step, config.agreement().every())) {
      if (!ranks_agree(state)) return Outcome::kRestore;
    }
    if (save) {
      begin_save(state);
      save_due = false;
    }
    note_needed_seconds(result.report.step_ms);
    if (last || stop) return end(state, stop ? parts_.stop.why() : "", divergence);
  }
}

Outcome Trainer::end(const TrainState& state, const std::string& stopped_by,
                     const std::string& divergence) {
  const bool stop = !stopped_by.empty();
  if (divergence.empty()) parts_.checkpoints.confirm();
  parts_.checkpoints.finish();
  parts_.reporter.saved(parts_.checkpoints.newest().value_or(0), parts_.checkpoints.save_seconds());
  if (!stop && !divergence.empty()) {
    fail(ExitCode::kNumerical, "step {}: training ends, but {}: not saved. {}", state.step,
         divergence, cure());
  }
  if (!stop) return Outcome::kDone;
  if (divergence.empty()) {
    const bool saved = parts_.checkpoints.newest() == state.step;
    log_info("{}: {} step {}", stopped_by, saved ? "saved at" : "not saved, still at", state.step);
  } else if (parts_.world.rank() == 0) {
    log_warning("{} at step {}: not saved, because {}. {}", stopped_by, state.step, divergence,
                cure());
  }
  return Outcome::kRequeue;
}

Trainer::StepResult Trainer::step(TrainState& state) {
  clock_.begin();
  const configs::Train& train = parts_.config.train();
  const double waited_ms = parts_.feed.waited_ms();
  std::optional<Batch> next;
  try {
    next = parts_.feed.next();
  } catch (const Error& error) {
    unread_ = error;  // the ranks give up this step together and save the one before
  }
  // Ranks that communicate in a pass compute with batches of one step, or all with the one before.
  const bool has_batch = parts_.pass_group == nullptr
                             ? next.has_value()
                             : !any_rank(*parts_.pass_group, !next.has_value(), "missing batches");
  if (has_batch) batch_ = train.cuda_graph() ? static_batch_.hold(*next) : std::move(next);
  if (has_batch && parts_.past != nullptr) parts_.past->attach(*batch_, state.consumed);
  clock_.has_batch();
  const GradientSums sums = sum_gradients(state.step + 1, state.loss_scale, [&] {
    return !has_batch || unread_ || parts_.stop.pressing();
  });
  StepResult result;
  result.abandoned = sums.abandoned;
  if (result.abandoned) return result;
  has_stepped_ = true;
  if (parts_.past != nullptr) parts_.past->advance(step_.next_past());
  ++state.step;
  state.held_out_loss.reset();
  const double scale = state.loss_scale.value;
  const double rate =
      step_.update(sums, state.step, state.consumed / parts_.samples_per_epoch, scale);

  // Report.
  require(batch_->global_size > 0, "a batch says how many samples its step takes");
  state.consumed += batch_->global_size;
  if (sums.finite() && !sums.has_targets) {
    if (parts_.world.rank() == 0 && !warned_of_targets_) {
      log_warning(
          "step {}: no token of its batch is a target, so it changes nothing (said once; such "
          "lines of metrics.jsonl have no loss)",
          state.step);
      warned_of_targets_ = true;
    }
  } else if (sums.finite()) {
    state.tokens += sums.num_tokens;
    state.skipped = 0;
    if (train.precision() == configs::Train::fp16) state.loss_scale.keep();
  } else if (scale_overflows(sums, state.loss_scale)) {
    state.loss_scale.shrink();
    if (parts_.world.rank() == 0) {
      log_info("step {}: gradients overflow fp16 with the loss scale {}: skipped, now {}",
               state.step, scale, state.loss_scale.value);
    }
  } else {
    count_skipped(state, sums);
  }
  result.applied = sums.applies();
  result.stop_requested = sums.stop_requested;
  result.tokens = sums.num_tokens;
  result.report.step = state.step;
  if (sums.has_targets) result.report.loss = sums.nats / sums.count;
  result.report.tokens = state.tokens;
  result.report.learning_rate = rate;
  result.report.grad_norm = sums.norm;
  result.report.figures = sums.figures;
  result.report.loader_wait_ms = parts_.feed.waited_ms() - waited_ms;
  clock_.end();
  result.report.step_ms = clock_.step_ms();
  parts_.activity.count_step(clock_.times(), batch_->size());
  return result;
}

GradientSums Trainer::sum_gradients(std::int64_t step, const LossScale& scale,
                                    const std::function<bool()>& gives_up) {
  const Batch none{.fields = {}, .sample_ids_B = at::zeros({0}, at::kLong)};
  return step_.sum_gradients(batch_ ? *batch_ : none, step, scale.value,
                             {.launched =
                                  [this] {
                                    clock_.passes_launched();
                                    parts_.feed.prefetch();
                                  },
                              .asks_to_stop = [this] { return parts_.stop.asked(); },
                              .gives_up = gives_up});
}

bool Trainer::scale_overflows(const GradientSums& sums, const LossScale& scale) const {
  return parts_.config.train().precision() == configs::Train::fp16 && sums.losses_finite() &&
         scale.may_overflow();
}

// Every rank sees the same sums, so every rank comes to the same decision.
void Trainer::count_skipped(TrainState& state, const GradientSums& sums) const {
  ++state.skipped;
  const std::string what = sums.describe_non_finite();
  const configs::Train& train = parts_.config.train();
  if (train.non_finite() == configs::Train::stop || state.skipped >= train.max_skipped()) {
    parts_.checkpoints.finish();  // a running save
    fail(ExitCode::kNumerical,
         "step {}: not finite: {}; {} in a row, and train.non_finite = {}, train.max_skipped = {} "
         "say stop. {}",
         state.step, what, state.skipped, configs::Train::NonFinite_Name(train.non_finite()),
         train.max_skipped(), cure());
  }
  if (parts_.world.rank() == 0) {
    log_warning("step {}: not finite: {}; skipped ({} in a row)", state.step, what, state.skipped);
  }
}

std::string Trainer::find_divergence(const TrainState& state, bool stop) {
  if (state.skipped > 0) {
    return fmt::format(
        "its last {} skipped as not finite",
        state.skipped == 1 ? "step was" : fmt::format("{} steps were", state.skipped));
  }
  if (state.held_out_loss && !std::isfinite(*state.held_out_loss)) {
    return fmt::format("the loss of its evaluation is {}", fixed_text(*state.held_out_loss, 4));
  }
  if (!parts_.checkpoints.saves() || !has_stepped_) return "";
  // Uses the same sequences again, after the memory that they left: a batch that cannot be read
  // must not keep the run from saving.
  parts_.activity.enter(Phase::kSave, state.step);
  int asked = 0;  // before the micro-batches, and before each
  // A pass that only keeps other ranks company comes first (TrainingStep).
  const int answers = parts_.buckets.passes_are_collective() ? 3 : 2;
  const GradientSums sums =
      sum_gradients(state.step + 1, state.loss_scale, [&] { return stop && ++asked > answers; });
  if (sums.finite() || scale_overflows(sums, state.loss_scale)) return "";
  return fmt::format("its parameters give values that are not finite: {}",
                     sums.describe_non_finite());
}

std::optional<Error> Trainer::any_unread() {
  ProcessGroup& world = parts_.world;
  const std::vector<std::string> codes = world.all_gather_bytes(
      unread_ ? fmt::format("{}", static_cast<int>(unread_->code())) : "", "codes of errors");
  const std::vector<std::string> reasons = world.all_gather_bytes(
      unread_ ? fmt::format("{} (rank {} on {})", unread_->what(), world.rank(), host_name()) : "",
      "batches that cannot be read");
  for (std::size_t rank = 0; rank < codes.size(); ++rank) {
    if (codes[rank].empty()) continue;
    return Error(static_cast<ExitCode>(parse_number<int>(codes[rank]).value()), reasons[rank]);
  }
  return std::nullopt;
}

std::string Trainer::cure() const { return cure_of_divergence(parts_.checkpoints.newest()); }

bool Trainer::evaluate(TrainState& state) {
  if (parts_.evaluator != nullptr) {
    parts_.activity.enter(Phase::kEvaluate, state.step);
    const std::optional<Evaluation> evaluation = parts_.evaluator->run([this] {
      parts_.activity.tick();
      return any_asks_to_stop();
    });
    if (!evaluation) return false;
    // Tensor ranks compute the loss by themselves, and it decides when training ends.
    const at::Tensor loss = at::full({1}, evaluation->loss, at::kDouble);
    parts_.world.broadcast(loss, /*root=*/0, "loss of the evaluation");
    state.evaluated(loss.item<double>());
    parts_.checkpoints.require_folder();
    parts_.reporter.evaluation(state.step, parts_.evaluator->plan().split, *evaluation);
  }
  state.evaluation_due = false;
  if (state.ends_early(parts_.config.evaluate()) && parts_.world.rank() == 0) {
    log_info(
        "step {}: the loss on {} was not below {} in {} in a row: training ends here "
        "(evaluate.patience = {})",
        state.step, parts_.config.evaluate().split(),
        fixed_text(state.lowest_loss.value_or(NAN), 4),
        counted(state.stale_evaluations, "evaluation"), parts_.config.evaluate().patience());
  }
  return true;
}

bool Trainer::is_last(const TrainState& state) const {
  return state.step >= parts_.config.train().steps() || state.ends_early(parts_.config.evaluate());
}

bool Trainer::any_asks_to_stop() {
  return any_rank(parts_.world, parts_.stop.asked(), "requests to stop");
}

void Trainer::note_needed_seconds(double step_ms) {
  longest_step_seconds_ = std::max(longest_step_seconds_, step_ms / 1000);
  const double save = parts_.checkpoints.expected_save_seconds();
  // The step that runs when the time comes, the check of its state, and a slow save.
  parts_.stop.set_needed_seconds(5 + 2 * longest_step_seconds_ + 2 * save);
}

void Trainer::begin_save(const TrainState& state) {
  parts_.activity.enter(Phase::kSave, state.step);
  parts_.checkpoints.save(state);
}

bool Trainer::ranks_agree(const TrainState& state) {
  if (parts_.agreement == nullptr) return true;
  const std::string difference = parts_.agreement->find_difference(state);
  if (difference.empty()) return true;
  parts_.checkpoints.finish();  // a running save
  constexpr const char* kCure =
      "faulty memory, CPU or network: test the hosts and exclude the faulty one";
  if (parts_.config.agreement().on_difference() == configs::Agreement::stop) {
    fail(ExitCode::kNumerical,
         "step {}: {}; {}, then start the same command again: the last checkpoint predates the "
         "difference (agreement.on_difference = restore would resume from it)",
         state.step, difference, kCure);
  }
  if (parts_.world.rank() == 0) {
    log_warning("step {}: {}; {}; going back to the last checkpoint", state.step, difference,
                kCure);
  }
  return false;
}

}  // namespace birkhoff
