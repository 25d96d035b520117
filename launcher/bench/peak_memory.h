// How much more memory LibTorch's tensors took than before, at most. Local.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace c10 {
struct Allocator;
}

namespace birkhoff {

// While one lives, tensors on the CPU are counted as they are allocated; at most one at a time.
// On a GPU LibTorch counts by itself.
class PeakMemory {
 public:
  explicit PeakMemory(c10::Device device);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  void restart();
  // Bytes since restart().
  std::size_t extra_bytes() const;

 private:
  c10::Device device_;
  c10::Allocator* before_ = nullptr;
  std::size_t live_at_start_ = 0;
};

}  // namespace birkhoff
