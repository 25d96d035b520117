// A group of ranks in the context of an autograd function, for its backward pass. The group
// outlives the model, and a model its graphs.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <bit>
#include <cstdint>

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

// Call it once in forward(). group: may be null.
inline void save_group(torch::autograd::AutogradContext* context, ProcessGroup* group) {
  context->saved_data["group"] = std::bit_cast<std::int64_t>(group);
}

// What save_group() has saved.
inline ProcessGroup* saved_group(torch::autograd::AutogradContext* context) {
  return std::bit_cast<ProcessGroup*>(context->saved_data["group"].toInt());
}

}  // namespace birkhoff
