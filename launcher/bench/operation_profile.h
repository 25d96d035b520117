// The time that each LibTorch operation takes in a computation. Our kernels that are not operations
// of its dispatcher count toward their caller.
#pragma once

#include <functional>
#include <string>

namespace birkhoff {

// Runs `work` a few times and returns a Markdown table: self time (without the operations that an
// operation calls) and calls per run, the most expensive operations first. Sees only the calling
// thread, so no operations on a GPU. Local.
std::string operation_profile(const std::function<void()>& work);

}  // namespace birkhoff
