// What a model is made of, for `birkhoff inspect`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/model.h"

namespace birkhoff {

struct ModelPart {
  std::string
      name;  // "embedding", "blocks.0.attention", "blocks.0.feed_forward", ..., "final_norm"
  std::int64_t num_parameters = 0;
};

// Parameters by part, in creation order; a tied output layer counts once, under "embedding".
std::vector<ModelPart> model_parts(Model& model);

// The parts as a table, their sum, and FLOPs of a sequence and of a training step's token.
std::string describe_model(Model& model);

}  // namespace birkhoff
