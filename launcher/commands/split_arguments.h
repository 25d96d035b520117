// The combined meaning of PATH, --train, --valid and --test of `prepare`.
#pragma once

#include <string>
#include <vector>

#include "data/prepare/prepare.h"
#include "launcher/commands.h"

namespace birkhoff {

// Sets the paths and fractions in `options`. A value of --valid or --test that reads as a number is
// a fraction, and the values after it are PATHs again. Error(kUsage) if values do not fit together.
// Returns notes about values that the user may have meant differently.
std::vector<std::string> set_texts(const std::vector<PrepareArguments::Text>& texts,
                                   PrepareOptions& options);

}  // namespace birkhoff
