#include "runtime/device_prefetcher.h"

#include <chrono>
#include <utility>

#ifdef BIRKHOFF_CUDA
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <exception>
#include <thread>

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
  struct Slot {
    Batch pinned, on_device;
    CudaEvent copied, used;
  };

  static at::Tensor pinned_like(const at::Tensor& tensor) {
    return at::empty_like(tensor, tensor.options().pinned_memory(true),
                          at::MemoryFormat::Contiguous);
  }

  // Returns false if there is no batch.
  bool fill(Slot& slot) {
    const std::optional<Batch> next = next_();
    if (!next) return false;
    const Batch& batch = *next;
    // Do not overwrite pinned memory that a copy still reads; usually it finished long ago.
    while (!slot.copied.passed()) std::this_thread::yield();
    if (!slot.pinned.sample_ids_B.defined()) {
      for (const auto& [name, tensor] : batch.fields) {
        slot.pinned.fields[name] = pinned_like(tensor);
      }
      slot.pinned.sample_ids_B = pinned_like(batch.sample_ids_B);
      slot.on_device = slot.pinned.to(device_);
    }
    const auto copy = [](const Batch& to, const Batch& from) {
      for (const auto& [name, tensor] : from.fields) {
        to.at(name).copy_(tensor, /*non_blocking=*/true);
      }
      to.sample_ids_B.copy_(from.sample_ids_B, /*non_blocking=*/true);
    };
    copy(slot.pinned, batch);
    slot.used.hold_back(stream_.get());
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(stream_.get(), device_.index()));
    copy(slot.on_device, slot.pinned);
    slot.on_device.global_size = batch.global_size;
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
