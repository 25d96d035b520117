#include "runtime/device_prefetcher.h"

#include <chrono>
#include <utility>

#ifdef BIRKHOFF_CUDA
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <exception>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/gpu/check.h"
#include "cluster/base/gpu/handles.h"
#endif

namespace birkhoff {

#ifdef BIRKHOFF_CUDA

class DevicePrefetcher::Gpu {
 public:
  Gpu(std::function<std::optional<Batch>()> next, at::Device device)
      : next_(std::move(next)), device_(device), stream_(CudaStream::Priority::kNormal) {}
  ~Gpu() {
    // The pinned memory is freed now; copies may still read it.
    (void)cudaStreamSynchronize(stream_.get());
  }

  std::optional<Batch> next() {
    const cudaStream_t computing = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    prefetch();
    if (error_) std::rethrow_exception(error_);
    if (!prefetched_) return std::nullopt;
    prefetched_ = false;
    Slot& slot = slots_[current_];
    current_ = 1 - current_;
    // The other slot has the previous batch: everything that reads it is queued by now.
    slots_[current_].used.record(computing);
    slot.copied.hold_back(computing);
    return slot.on_device;
  }

  // An error is thrown where the batch is needed, between steps.
  void prefetch() {
    if (prefetched_ || error_) return;
    try {
      prefetched_ = fill(slots_[current_]);
    } catch (const Error&) {
      error_ = std::current_exception();
    }
  }

 private:
  // Memory for the largest tensor so far that a field of a slot had. 1-D.
  struct Memory {
    at::Tensor pinned, on_device;
  };
  struct Slot {
    std::map<std::string, Memory, std::less<>> memory;
    Batch on_device;
    CudaEvent copied, used;
  };

  static at::Tensor shaped(const at::Tensor& memory, at::IntArrayRef sizes) {
    return memory.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  }

  // Returns false if there is no batch.
  bool fill(Slot& slot) {
    const std::optional<Batch> next = next_();
    if (!next) return false;
    const Batch& batch = *next;
    // Do not overwrite pinned memory that a copy still reads; usually it finished long ago.
    while (!slot.copied.passed()) std::this_thread::yield();
    const cudaStream_t computing = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to the device, from pinned memory
    const auto place = [&](const std::string& name, const at::Tensor& tensor) {
      Memory& memory = slot.memory[name];
      if (!memory.pinned.defined() || memory.pinned.numel() < tensor.numel()) {
        memory.pinned = at::empty({tensor.numel()}, tensor.options().pinned_memory(true));
        memory.on_device = at::empty({tensor.numel()}, tensor.options().device(device_));
        // The new memory may be what queued work still reads.
        slot.used.record(computing);
      }
      const at::Tensor pinned = shaped(memory.pinned, tensor.sizes());
      pinned.copy_(tensor);
      copies.emplace_back(shaped(memory.on_device, tensor.sizes()), pinned);
      return copies.back().first;
    };
    for (const auto& [name, tensor] : batch.fields) {
      slot.on_device.fields[name] = place(name, tensor);
    }
    slot.on_device.sample_ids_B = place("", batch.sample_ids_B);
    slot.on_device.global_size = batch.global_size;
    slot.on_device.num_documents = batch.num_documents;
    slot.used.hold_back(stream_.get());
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(stream_.get(), device_.index()));
    for (const auto& [to, from] : copies) to.copy_(from, /*non_blocking=*/true);
    slot.copied.record(stream_.get());
    return true;
  }

  std::function<std::optional<Batch>()> next_;
  const at::Device device_;
  CudaStream stream_;
  std::array<Slot, 2> slots_;
  std::size_t current_ = 0;
  bool prefetched_ = false;
  std::exception_ptr error_;
};

DevicePrefetcher::DevicePrefetcher(std::function<std::optional<Batch>()> next, at::Device device)
    : next_(std::move(next)) {
  if (device.is_cuda()) {
    gpu_ = std::make_unique<Gpu>([this] { return timed_next(); }, device);
  }
}

std::optional<Batch> DevicePrefetcher::next() {
  return gpu_ != nullptr ? gpu_->next() : timed_next();
}

void DevicePrefetcher::prefetch() {
  if (gpu_ != nullptr) gpu_->prefetch();
}

#else

class DevicePrefetcher::Gpu {};

DevicePrefetcher::DevicePrefetcher(std::function<std::optional<Batch>()> next, at::Device)
    : next_(std::move(next)) {}

std::optional<Batch> DevicePrefetcher::next() { return timed_next(); }

void DevicePrefetcher::prefetch() {}

#endif

std::optional<Batch> DevicePrefetcher::timed_next() {
  const auto start = std::chrono::steady_clock::now();
  std::optional<Batch> batch = next_();
  waited_ms_ +=
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return batch;
}

DevicePrefetcher::~DevicePrefetcher() = default;

}  // namespace birkhoff
