// Host memory that the device reads and writes directly, so that copies run beside the computation.
#pragma once

#include <cstddef>

#include "cluster/base/unique_handle.h"

namespace birkhoff {

struct PinnedMemoryTraits {
  using Handle = void*;
  static Handle null() { return nullptr; }
  static void close(Handle memory) noexcept;
};

// Pinned memory is made by the driver in about a millisecond and takes memory away from the page
// cache: keep buffers, do not make one for each copy. Must outlive the copies that use it. Error
// (kMemory) where the host has none left.
class PinnedBuffer {
 public:
  // num_bytes > 0, not initialised, aligned to a page.
  explicit PinnedBuffer(std::size_t num_bytes);

  std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }
  std::size_t size() const { return num_bytes_; }

 private:
  UniqueHandle<PinnedMemoryTraits> memory_;
  std::size_t num_bytes_;
};

}  // namespace birkhoff
