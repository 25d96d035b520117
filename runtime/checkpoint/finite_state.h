// A check whether training can resume from a state: a parameter or moment that is not finite stays
// so in all later steps.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

// Whether all values of a contiguous tensor on the CPU are finite. Also copies them to `out`, unless
// it is null: one pass over memory, because training waits for it.
bool copy_finite(const at::Tensor& data, std::byte* out);

// The name of the first part, of any owner, with a value that is not finite; empty if there is none.
// Reads all parts once. Waits for a GPU that holds some of them. Local.
std::string find_non_finite(const std::vector<TensorPart>& parts);

}  // namespace birkhoff
