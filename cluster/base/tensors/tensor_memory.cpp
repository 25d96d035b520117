#include "cluster/base/tensors/tensor_memory.h"

#include <utility>

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

void free_memory(const at::Tensor& tensor) {
  c10::StorageImpl& storage = storage_of(tensor);
  storage.set_data_ptr_noswap(storage.allocator()->allocate(0));
  storage.set_nbytes(0);
}

void TensorMemory::take(const at::Tensor& tensor) {
  require(tensor.storage_offset() == 0 && tensor.is_contiguous() &&
              (tensor.numel() == 0 || !has_memory(tensor)),
          "TensorMemory: all of a storage without memory");
  c10::StorageImpl& storage = storage_of(tensor);
  const std::size_t bytes = tensor.nbytes();
  const auto kept = kept_.lower_bound(bytes);
  const bool fits = kept != kept_.end() && kept->first <= 2 * bytes;
  const std::size_t size = fits ? kept->first : bytes;
  storage.set_data_ptr_noswap(fits ? std::move(kept->second)
                                   : storage.allocator()->allocate(bytes));
  if (fits) kept_.erase(kept);
  if (tensor.is_cpu()) sizes_[storage.data()] = size;
  storage.set_nbytes(bytes);
}

void TensorMemory::free(const at::Tensor& tensor) {
  c10::StorageImpl& storage = storage_of(tensor);
  const auto size = sizes_.find(storage.data());
  if (!tensor.is_cpu() || !has_memory(tensor) || size == sizes_.end()) return free_memory(tensor);
  kept_.emplace(size->second, storage.set_data_ptr(storage.allocator()->allocate(0)));
  sizes_.erase(size);
  storage.set_nbytes(0);
}

}  // namespace birkhoff
