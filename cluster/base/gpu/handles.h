// Owners of CUDA streams and events. Both belong to the device that is current when they are made;
// a process uses one device. Move-only. All calls are local.
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

// A stream of its own, which does not wait for the legacy default stream. Closing it does not wait
// for the work in it.
class CudaStream {
 public:
  enum class Priority { kNormal, kHigh };
  explicit CudaStream(Priority priority);

  cudaStream_t get() const { return stream_.get(); }

 private:
  UniqueHandle<CudaStreamTraits> stream_;
};

// A place in a stream's order. Takes no times, so recording it is cheap.
class CudaEvent {
 public:
  CudaEvent();

  // The place is behind all that is in `stream` now; an earlier place is forgotten.
  void record(cudaStream_t stream);
  // What is put into `stream` from now on runs after the place. Does not block the host.
  void hold_back(cudaStream_t stream) const;
  // Has the device passed the place? True if it was never recorded.
  bool passed() const;

 private:
  UniqueHandle<CudaEventTraits> event_;
};

}  // namespace birkhoff
