// Where the time of a computation goes, by LibTorch's operations; kernels of ours that are no
// operations of its dispatcher count to what calls them.
#pragma once

#include <functional>
#include <string>

namespace birkhoff {

// Runs `work` a few times and returns a table in Markdown: self time (without the operations that
// an operation calls) and calls of one run, the most expensive operations first. Sees the calling
// thread alone, so no operations on a GPU. Local.
std::string operation_profile(const std::function<void()>& work);

}  // namespace birkhoff
