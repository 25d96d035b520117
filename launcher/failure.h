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

Failure describe_failure(const std::exception_ptr& exception);

}  // namespace birkhoff
