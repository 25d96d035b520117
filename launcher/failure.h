// From an exception to what a user sees: one line and an exit code.
#pragma once

#include <exception>
#include <string>

#include "cluster/base/error.h"

namespace birkhoff {

struct Failure {
  ExitCode code = ExitCode::kInternal;
  std::string what;  // without newlines or stack traces
};

// Names that users give may hold line ends and escape sequences: spaces in their place.
std::string one_line(std::string text);

Failure describe_failure(const std::exception_ptr& exception);

}  // namespace birkhoff
