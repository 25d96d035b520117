// Types shared by kernels and the code that launches them. Compiled by g++ and nvcc: no LibTorch
// here.
#pragma once

#ifdef __CUDACC__
#define BIRKHOFF_HOST_DEVICE __host__ __device__
#else
#define BIRKHOFF_HOST_DEVICE
#endif

namespace birkhoff {

// Element types.
enum class KernelDtype { kFloat, kDouble, kBFloat16, kHalf, kLong };

// The operation that combines the elements of several ranks.
enum class ReduceOp { kSum, kMax, kMin };

}  // namespace birkhoff
