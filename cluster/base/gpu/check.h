// Status check of CUDA calls. For g++ and nvcc alike: no LibTorch here.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

namespace birkhoff {

// Unless status is cudaSuccess: Error with CUDA's text, the call and the place; kMemory where
// device memory is short, kUsage where the machine has no usable GPU or driver, else kInternal.
// Kernels run later than they are launched, so a call may report the error of an earlier one; the
// preset cuda-debug waits after each launch and finds it there. After an error other than kMemory
// nothing works on this device in this process any more: the job must end.
void cuda_check(cudaError_t status, const char* call,
                std::source_location where = std::source_location::current());

// After a launch on `stream`: reports the last error of this thread. In the preset cuda-debug it
// first waits for the stream, unless the stream is being captured into a graph.
void cuda_check_launch(cudaStream_t stream, std::source_location where);

}  // namespace birkhoff
