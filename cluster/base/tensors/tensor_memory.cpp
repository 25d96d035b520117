#include "cluster/base/tensors/tensor_memory.h"

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || storage_of(tensor).nbytes() > 0;
}

void take_memory(const at::Tensor& tensor) {
  require(tensor.storage_offset() == 0 && tensor.is_contiguous() &&
              (tensor.numel() == 0 || !has_memory(tensor)),
          "take_memory: all of a storage without memory");
  c10::StorageImpl& storage = storage_of(tensor);
  storage.set_data_ptr_noswap(storage.allocator()->allocate(tensor.nbytes()));
  storage.set_nbytes(tensor.nbytes());
}

void free_memory(const at::Tensor& tensor) {
  c10::StorageImpl& storage = storage_of(tensor);
  storage.set_data_ptr_noswap(storage.allocator()->allocate(0));
  storage.set_nbytes(0);
}

}  // namespace birkhoff
