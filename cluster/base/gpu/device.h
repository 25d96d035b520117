// Where tensors live and kernels run, for code that is compiled with and without CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;  // cudaStream_t points to it

namespace birkhoff {

// Whether this program was built with CUDA, and so has kernels for GPUs.
#ifdef BIRKHOFF_CUDA
inline constexpr bool kHasGpuKernels = true;
#else
inline constexpr bool kHasGpuKernels = false;
#endif

// Usable GPUs of this machine, at least 1. Error(kUsage), one line that says what to do, if there
// are none or this program was built without CUDA. Takes nothing of any GPU. Local.
int count_cuda_devices();

// The GPU of the rank with this number among the ranks of its machine: the one of the same number.
// Makes it the current device of the calling thread, which gets a stream of its own (the default
// stream cannot be recorded into CUDA graphs), and LibTorch's operations deterministic. Errors as
// before, and if there are not so many GPUs; with BIRKHOFF_SHARE_GPUS in the environment ranks of
// one machine share them, for tests of function. Local.
at::Device cuda_device(int local_rank);

// What this process holds of the device's memory now and held at most, in one line: resident memory
// for the CPU; LibTorch's share, and what is free, for a GPU. For logs. Local.
std::string memory_report(at::Device device);

// What the maker calls this GPU, or the processor that this thread runs on. Local.
std::string device_name(at::Device device);

// Returns when the GPU has done what the calling thread's current stream holds, at once for the
// CPU. Local.
void synchronize(at::Device device);

// ---- For the sources that launch kernels.

// The stream that operations on this CUDA tensor's device are put into now, by this thread. Only in
// builds with CUDA.
CUstream_st* current_stream(const at::Tensor& tensor);

// Error(kInternal) for a dtype that no kernel has.
KernelDtype kernel_dtype(const at::Tensor& tensor);

// Can all of `num_bytes` be moved 16 bytes at a time from where the tensor's data begins?
bool fits_vectors(const at::Tensor& tensor, std::int64_t num_bytes);

}  // namespace birkhoff
