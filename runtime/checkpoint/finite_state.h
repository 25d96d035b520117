// A check whether training can resume from a state: a parameter or moment that is not finite stays
// so in all later steps.
#pragma once

#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

// The name of the first tensor, in the order of ranks, with a non-finite value in a part that its
// rank owns; empty if there is none. Reads all of the state once. Collective over `world`; the same
// on all ranks.
std::string find_non_finite(const std::vector<TensorPart>& parts, ProcessGroup& world);

// The same for all parts that one process holds, whatever their owner. Local.
std::string find_non_finite(const std::vector<TensorPart>& parts);

}  // namespace birkhoff
