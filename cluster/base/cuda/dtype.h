// Element types of kernels. For kernels and their callers alike: no LibTorch here.
#pragma once

namespace birkhoff {

enum class KernelDtype { kFloat, kDouble, kBFloat16, kHalf, kLong };

}  // namespace birkhoff
