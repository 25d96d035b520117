#include "cluster/base/cuda/pinned_buffer.h"

#include <cuda_runtime_api.h>

#include "cluster/base/cuda/check.h"
#include "cluster/base/error.h"

namespace birkhoff {

void PinnedMemoryTraits::close(Handle memory) noexcept { (void)cudaFreeHost(memory); }

PinnedBuffer::PinnedBuffer(std::size_t num_bytes) : num_bytes_(num_bytes) {
  require(num_bytes > 0, "a pinned buffer of 0 bytes");
  void* memory = nullptr;
  cuda_check(cudaHostAlloc(&memory, num_bytes, cudaHostAllocDefault), "cudaHostAlloc");
  memory_.reset(memory);
}

}  // namespace birkhoff
