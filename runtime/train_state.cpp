#include "runtime/train_state.h"

#include <fmt/format.h>

#include <cmath>

#include "cluster/base/text/number_text.h"

namespace birkhoff {

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
  header.set_loss_scale(state.loss_scale.value);
  header.set_loss_scale_steps(state.loss_scale.steps_since);
}

void read_state(const CheckpointHeader& header, TrainState& state) {
  state.step = header.step();
  state.consumed = header.consumed();
  state.tokens = header.tokens();
  state.skipped = header.skipped();
  state.evaluation_due = header.evaluation_due();
  if (header.has_loss_scale()) state.loss_scale = {header.loss_scale(), header.loss_scale_steps()};
  if (header.has_held_out_loss()) state.held_out_loss = header.held_out_loss();
}

std::string text_of(const TrainState& state) {
  std::string text = fmt::format(
      "step {}, {} sequences and {} tokens read, {} steps skipped, loss scale {} for {} "
      "steps",
      state.step, state.consumed, state.tokens, state.skipped, plain_text(state.loss_scale.value),
      state.loss_scale.steps_since);
  if (state.held_out_loss) text += ", held-out loss " + plain_text(*state.held_out_loss);
  if (state.evaluation_due) text += ", to be evaluated";
  return text;
}

}  // namespace birkhoff
