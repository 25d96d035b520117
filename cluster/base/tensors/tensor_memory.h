// Memory that a tensor has only part of the time. Views of the tensor, also those that autograd has
// saved, stay valid: they see the memory that the tensor has now.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <map>

namespace birkhoff {

// Whether the tensor has memory. Always true of one without elements.
bool has_memory(const at::Tensor& tensor);
// Frees its memory and with it the values. On a GPU, operations that the current stream has already
// queued may still use it.
void free_memory(const at::Tensor& tensor);

// Memory for tensors that have some in turn. On the CPU it keeps what they free, to its end, and
// gives a tensor a block of at most twice its size: otherwise other tensors would take parts of it,
// and a rank's memory would grow by all that passes through. GPUs have an allocator that does so.
class TensorMemory {
 public:
  // Gives the tensor memory, without values. It must be all of its storage and have none.
  void take(const at::Tensor& tensor);
  // As free_memory().
  void free(const at::Tensor& tensor);

 private:
  std::multimap<std::size_t, c10::DataPtr> kept_;  // by size in bytes
  std::map<const void*, std::size_t> sizes_;       // of the blocks that tensors have
};

}  // namespace birkhoff
