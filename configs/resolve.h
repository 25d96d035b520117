// Defaults, written out.
#pragma once

#include "configs/config.pb.h"

namespace birkhoff {

// Sets every field that is not set: numbers, strings and enums to their defaults, messages
// recursively (of a oneof only the chosen one; optimizer: adamw, mechanism: dense), 0s that stand
// for "derived" to what they are derived to where the config alone decides it. Resolving twice
// changes nothing. Expects numbers in their ranges.
void resolve(configs::Config& config);

}  // namespace birkhoff
