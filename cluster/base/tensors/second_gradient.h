// The error of our kernels' backward passes if a caller asks for gradients of gradients.
#pragma once

#include <c10/core/GradMode.h>

#include <source_location>

#include "cluster/base/error.h"

namespace birkhoff {

// A backward pass that autograd cannot differentiate calls this first. Error(kInternal) under
// create_graph, where its gradients would silently count as constants.
inline void refuse_second_gradient(std::source_location where = std::source_location::current()) {
  require(!c10::GradMode::is_enabled(),
          "a kernel's gradient cannot be differentiated: do not set create_graph", where);
}

}  // namespace birkhoff
