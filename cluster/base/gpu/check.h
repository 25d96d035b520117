// Status checks for CUDA calls. Compiled by g++ and nvcc: no LibTorch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <source_location>

namespace birkhoff {

// Throws an Error with CUDA's text, the call and the source location unless status is cudaSuccess:
// kMemory if device memory runs out, kUsage if the machine has no usable GPU or driver, else
// kInternal. Kernels run asynchronously, so a call may report the error of an earlier one; the
// preset cuda-debug waits after each launch and finds the error there. After an error other than
// kMemory the device no longer works in this process: the job must end.
void cuda_check(cudaError_t status, const char* call,
                std::source_location where = std::source_location::current());

// Throws an Error(kUsage) that says what to change if a launch needs more thread blocks than a
// grid has, or more bytes of shared memory for a block than `most_shared`, the device's limit.
void check_launch_fits(std::int64_t blocks, std::size_t shared_bytes, std::size_t most_shared,
                       std::source_location where);

// Call after a launch on `stream`: throws the last error of this thread. In the preset cuda-debug
// it then waits for the stream and throws its error, unless the stream is being captured into a
// graph.
void cuda_check_launch(cudaStream_t stream, std::source_location where);

}  // namespace birkhoff
