// Owners of CUDA streams and events. Both belong to the device that is current when they are
// created; a process uses one device. Move-only. All calls are local.
#pragma once

#include <cuda_runtime_api.h>

#include "cluster/base/unique_handle.h"

namespace birkhoff {

struct CudaStreamTraits {
  using Handle = cudaStream_t;
  static Handle null() { return nullptr; }
  static void close(Handle stream) noexcept;
};

struct CudaEventTraits {
  using Handle = cudaEvent_t;
  static Handle null() { return nullptr; }
  static void close(Handle event) noexcept;
};

// A stream that does not wait for the legacy default stream. Its destructor does not wait for the
// work on it.
class CudaStream {
 public:
  enum class Priority { kNormal, kHigh };
  explicit CudaStream(Priority priority);

  cudaStream_t get() const { return stream_.get(); }

 private:
  UniqueHandle<CudaStreamTraits> stream_;
};

// A point in a stream's order. It records no time, so it is cheap.
class CudaEvent {
 public:
  CudaEvent();

  // Moves the point to the end of the work now queued on `stream`.
  void record(cudaStream_t stream);
  // Work queued on `stream` from now on runs after the point. Does not block the host.
  void hold_back(cudaStream_t stream) const;
  // True if the device has passed the point, or if the event was never recorded.
  bool passed() const;

 private:
  UniqueHandle<CudaEventTraits> event_;
};

}  // namespace birkhoff
