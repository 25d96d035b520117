// Memory that a tensor has only part of the time. Views of the tensor, also those that autograd has
// saved, stay valid: they see the memory that the tensor has now.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// Whether the tensor has memory. Always true of one without elements.
bool has_memory(const at::Tensor& tensor);
// Gives the tensor memory, without values. It must be all of its storage and have none.
void take_memory(const at::Tensor& tensor);
// Frees its memory and with it the values. On a GPU, operations that the current stream has already
// queued may still use it.
void free_memory(const at::Tensor& tensor);

}  // namespace birkhoff
