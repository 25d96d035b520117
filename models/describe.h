// The parts of a model and their sizes, for `birkhoff inspect`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/model.h"

namespace birkhoff {

struct ModelPart {
  // For example "embedding", "blocks.0.attention", "blocks.0.feed_forward" or "final_norm".
  std::string name;
  std::int64_t num_parameters = 0;
};

// The number of parameters of each part, in creation order. A tied output layer is counted once,
// under "embedding".
std::vector<ModelPart> model_parts(Model& model);

// A table of the parts and their total, then the forward FLOPs of one sequence and the training
// FLOPs of one of its `sequence_length` tokens, then what the model's statistics say.
std::string describe_model(Model& model, std::int64_t sequence_length);

}  // namespace birkhoff
