// The numbers of a run that change with its steps, and their form in a checkpoint's manifest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/gradients/loss_scale.h"

namespace birkhoff::configs {
class Config;
class Evaluate;
}  // namespace birkhoff::configs

namespace birkhoff {

// Where a run stands: with parameters and optimizer state, all that resuming needs.
struct TrainState {
  std::int64_t step = 0;        // optimizer steps done, skipped ones included
  std::int64_t consumed = 0;    // sequences, over all epochs: the position in the data
  std::int64_t tokens = 0;      // counted targets of the applied steps
  std::int32_t skipped = 0;     // skipped steps in a row
  bool evaluation_due = false;  // a signal stopped the run before the evaluation of this step
  LossScale loss_scale;
  std::optional<double> held_out_loss = {};  // of the evaluation at this step, if there was one
  std::optional<double> lowest_loss = {};    // of all evaluations
  std::int32_t stale_evaluations = 0;        // those after the lowest loss

  // Takes the loss of the evaluation at this step into account.
  void evaluated(double loss);
  // Whether evaluate.patience ends training here: only at a step that is evaluated, and not after a
  // skipped step, which is not saved.
  bool ends_early(const configs::Evaluate& evaluate) const;
};

// To and from a manifest. A loss that is not finite is omitted; a loss scale that is missing from
// the manifest keeps its value in `state`. config: of the run that goes on. If it evaluates other
// data (evaluated_data()), its count of evaluations begins.
void write_state(const TrainState& state, CheckpointHeader& header);
void read_state(const CheckpointHeader& header, const configs::Config& config, TrainState& state);

// The whole state in one line, equal for equal states: ranks compare it.
std::string text_of(const TrainState& state);

}  // namespace birkhoff
