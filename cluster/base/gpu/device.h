// Devices of tensors and kernels, for code that is compiled with and without CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;  // cudaStream_t points to it

namespace birkhoff {

// True if this program was built with CUDA and so has GPU kernels.
#ifdef BIRKHOFF_CUDA
inline constexpr bool kHasGpuKernels = true;
#else
inline constexpr bool kHasGpuKernels = false;
#endif

// Number of usable GPUs of this machine, at least 1. Error(kUsage) if there are none or this
// program was built without CUDA. Allocates nothing on any GPU. Local.
int count_cuda_devices();

// The GPU of rank `local_rank` of this machine: the only one that the process sees, or else the one
// with this index. Makes it current in the calling thread, gives the thread its own stream (graphs
// cannot capture the default one), and makes LibTorch's operations deterministic. Errors as above,
// and Error(kUsage) if there are too few GPUs. With BIRKHOFF_SHARE_GPUS in the environment ranks of
// a machine share its GPUs, for functional tests; otherwise `train` refuses it. Local.
at::Device cuda_device(int local_rank);

// This process's current and peak memory on the device, in one line: resident memory for the CPU;
// LibTorch's memory, free memory and host memory for a GPU. For logs. Local.
std::string memory_report(at::Device device);

// The vendor's name of this GPU, or of the machine's CPU. Local.
std::string device_name(at::Device device);

// The identity of a GPU, which no other GPU of any machine has, in hexadecimal digits. Local.
std::string gpu_uuid(at::Device device);

// The newest CUDA version that this machine's driver supports, and the version of the CUDA library,
// such as "13.0, library 12.6"; "none" in builds without CUDA. Local.
std::string gpu_driver();

// Returns when the GPU has done the work on the calling thread's current stream; at once for the
// CPU. Local.
void synchronize(at::Device device);

// ---- For the sources that launch kernels.

// This thread's current stream on the device of a CUDA tensor. Only in builds with CUDA.
CUstream_st* current_stream(const at::Tensor& tensor);

// The dtype of kernels. Error(kInternal) if no kernel supports it.
KernelDtype kernel_dtype(at::ScalarType dtype);
inline KernelDtype kernel_dtype(const at::Tensor& tensor) {
  return kernel_dtype(tensor.scalar_type());
}

// True if `num_bytes` from the start of the tensor's data can be moved 16 bytes at a time.
bool fits_vectors(const at::Tensor& tensor, std::int64_t num_bytes);

}  // namespace birkhoff
