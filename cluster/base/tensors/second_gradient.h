// What a backward pass of our kernels says where gradients of gradients are asked for.
#pragma once

#include <c10/core/GradMode.h>

#include <source_location>

#include "cluster/base/error.h"

namespace birkhoff {

// To be called first by a backward pass that autograd cannot follow: under create_graph its
// gradients would count as constants without a word. Error(kInternal) then.
inline void refuse_second_gradient(std::source_location where = std::source_location::current()) {
  require(!c10::GradMode::is_enabled(), "a kernel's gradient has no gradient: no create_graph",
          where);
}

}  // namespace birkhoff
