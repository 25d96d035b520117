// Short human-readable descriptions of resolved configs.
#pragma once

#include <string>
#include <vector>

#include "configs/schema/config.pb.h"

namespace birkhoff {

// Describes the attention of a model's layers, with values that differ from their defaults, for
// instance "sinkhorn { block: 32 max_blocks: 8 }", "2 heads dense, 2 heads block_local", "layers in
// turn: dense; block_local", "encoder: dense | decoder: dense | cross-attention: dense".
std::string attention_text(const configs::Model& model);

// Describes a model's layers: "4 layers, 128 channels, 4 heads", and what is not the default, such
// as "post-norm".
std::string layers_text(const configs::Model& model);

// Describes how a model is trained: the optimizer with values that differ from their defaults, and
// the schedule, for instance "sgd { nesterov: true }, step_decay at epochs 30, 60".
std::string optimization_text(const configs::Train& train);

// A field in which configs differ: its text in each, "-" if a config lacks it.
struct DifferingField {
  std::string path;
  std::vector<std::string> texts;
};
// Returns the fields in schema order.
std::vector<DifferingField> differing_fields(const std::vector<configs::Config>& configs);

}  // namespace birkhoff
