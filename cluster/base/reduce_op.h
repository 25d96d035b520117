// How the elements of several ranks become one. For kernels too: no LibTorch here.
#pragma once

namespace birkhoff {

enum class ReduceOp { kSum, kMax, kMin };

}  // namespace birkhoff
