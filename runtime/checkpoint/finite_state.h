// Checks that all values of a training state are finite. Training cannot resume from any other
// state: a parameter or moment that is not finite stays so in all later steps.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

// Returns whether all values of a contiguous tensor on the CPU are finite. Unless `copy` is null,
// also copies the values there. Reads the tensor once, because training waits for it.
bool all_finite(const at::Tensor& data, std::byte* copy = nullptr);

// Returns the name of the first part that has a value that is not finite, or "" if there is none.
// Checks all parts, also parts that another rank saves. Reads each once. Waits for the GPU if it
// holds parts. Local.
std::string find_non_finite(const std::vector<TensorPart>& parts);

}  // namespace birkhoff
