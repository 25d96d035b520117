// The form of an exception that a user sees: one line and an exit code.
#pragma once

#include <exception>
#include <string>

#include "cluster/base/error.h"

namespace birkhoff {

struct Failure {
  ExitCode code = ExitCode::kInternal;
  std::string what;  // without newlines or stack traces
};

// Replaces control characters with spaces, because names from users may contain newlines and escape
// sequences.
std::string one_line(std::string text);

Failure describe_failure(const std::exception_ptr& exception);

}  // namespace birkhoff
