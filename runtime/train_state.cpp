#include "runtime/train_state.h"

#include <fmt/format.h>

#include <cmath>

#include "cluster/base/text/number_text.h"
#include "configs/loader/check.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

void TrainState::evaluated(double loss) {
  held_out_loss = loss;
  if (std::isfinite(loss) && (!lowest_loss || loss < *lowest_loss)) {
    lowest_loss = loss;
    stale_evaluations = 0;
  } else {
    ++stale_evaluations;
  }
}

bool TrainState::ends_early(const configs::Evaluate& evaluate) const {
  return evaluate.patience() > 0 && stale_evaluations >= evaluate.patience() &&
         step % evaluate.every() == 0 && !evaluation_due && skipped == 0;
}

void write_state(const TrainState& state, CheckpointHeader& header) {
  header.set_step(state.step);
  header.set_consumed(state.consumed);
  header.set_tokens(state.tokens);
  header.set_skipped(state.skipped);
  header.set_evaluation_due(state.evaluation_due);
  header.clear_held_out_loss();
  if (state.held_out_loss && std::isfinite(*state.held_out_loss)) {
    header.set_held_out_loss(*state.held_out_loss);
  }
  header.clear_lowest_loss();
  if (state.lowest_loss) header.set_lowest_loss(*state.lowest_loss);
  header.set_stale_evaluations(state.stale_evaluations);
  header.set_loss_scale(state.loss_scale.value);
  header.set_loss_scale_steps(state.loss_scale.steps_since);
}

void read_state(const CheckpointHeader& header, const configs::Config& config, TrainState& state) {
  state.step = header.step();
  state.consumed = header.consumed();
  state.tokens = header.tokens();
  state.skipped = header.skipped();
  state.evaluation_due = header.evaluation_due();
  if (header.has_loss_scale()) state.loss_scale = {header.loss_scale(), header.loss_scale_steps()};
  if (header.has_held_out_loss()) state.held_out_loss = header.held_out_loss();
  if (evaluated_data(header.config()) != evaluated_data(config)) return;
  if (header.has_lowest_loss()) state.lowest_loss = header.lowest_loss();
  state.stale_evaluations = header.stale_evaluations();
}

std::string text_of(const TrainState& state) {
  std::string text = fmt::format(
      "step {}, {} sequences and {} tokens read, {} steps skipped, loss scale {} for {} "
      "steps",
      state.step, state.consumed, state.tokens, state.skipped, plain_text(state.loss_scale.value),
      state.loss_scale.steps_since);
  if (state.held_out_loss) text += ", held-out loss " + plain_text(*state.held_out_loss);
  if (state.lowest_loss) text += ", lowest " + plain_text(*state.lowest_loss);
  if (state.stale_evaluations > 0)
    text += fmt::format(", {} evaluations after the lowest", state.stale_evaluations);
  if (state.evaluation_due) text += ", to be evaluated";
  return text;
}

}  // namespace birkhoff
