// The memory of a model between the steps of a run (configs.Memory): for each position of the
// global batch, the inputs of the layers at the last tokens that it has read. Position p of each
// batch reads part p of the text (data/loader/batch_plan.h), so its memory is that of the tokens
// before its sequence. It is empty at the start of a part, in each epoch.
//
// Legend: B positions of this rank, N layers, M tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "data/batch/batch.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff::configs {
class Config;
}  // namespace birkhoff::configs

namespace birkhoff {

class Model;
class ProcessGroup;

class CarriedPast {
 public:
  // `group`: the data-parallel ranks; this one has the positions of rank_share(). Empty for a model
  // that carries nothing. samples_per_epoch: of the parts together.
  CarriedPast(const configs::Config& config, Model& model, const ProcessGroup& group,
              std::int64_t samples_per_epoch);

  // Adds to this rank's batch at position `consumed` of the data what it continues.
  void attach(Batch& batch, std::int64_t consumed) const;
  // Takes what the step left (TrainingStep::next_past). Values that are not finite, which a skipped
  // step may have, become 0.
  void advance(const at::Tensor& next_BNMC);
  // This rank's rows of the tensor "memory" of all positions, as views.
  std::vector<TensorPart> parts() const;

 private:
  std::int64_t global_batch_, steps_per_epoch_ = 0, sequence_length_;
  std::int64_t first_row_ = 0;
  at::Tensor tokens_BNMC;  // the last ones are the newest; undefined: nothing is carried
  int owner_;
};

}  // namespace birkhoff
