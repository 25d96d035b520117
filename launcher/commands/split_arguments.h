// What PATH, --train, --valid and --test of `prepare` mean together.
#pragma once

#include <string>
#include <vector>

#include "data/prepare/prepare.h"
#include "launcher/commands.h"

namespace birkhoff {

// Sets paths and fractions of the options. A value of --valid or --test that reads as a number is a
// fraction, and what follows it is a PATH again. Error(kUsage) where values do not fit together.
// Returns lines about what might have been meant otherwise.
std::vector<std::string> set_texts(const std::vector<PrepareArguments::Text>& texts,
                                   PrepareOptions& options);

}  // namespace birkhoff
