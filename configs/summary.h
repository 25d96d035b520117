// Short texts about resolved configs, for people.
#pragma once

#include <string>
#include <vector>

#include "configs/config.pb.h"

namespace birkhoff {

// The attention of a model's layers with what is not its default, for instance
// "sinkhorn { block: 32 max_blocks: 8 }", "2 heads dense, 2 heads block_local", "layers in turn:
// dense; block_local".
std::string attention_text(const configs::Model& model);

// A field in which configs differ: its text in each, "-" where it is not.
struct DifferingField {
  std::string path;
  std::vector<std::string> texts;
};
// In the order of the schema.
std::vector<DifferingField> differing_fields(const std::vector<configs::Config>& configs);

}  // namespace birkhoff
