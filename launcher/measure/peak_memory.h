// The peak of the additional memory that LibTorch's tensors use. Local.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace c10 {
struct Allocator;
}

namespace birkhoff {

// While an object exists, it counts tensors on the CPU as they are allocated, and tensors on the
// meta device as if they had memory; at most one object may exist at a time. On a GPU, LibTorch
// counts by itself.
class PeakMemory {
 public:
  explicit PeakMemory(c10::Device device);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  void restart();
  // The peak since restart(), in bytes above the use at restart().
  std::size_t extra_bytes() const;
  // The current use, in bytes above the use at restart().
  std::int64_t live_bytes() const;

 private:
  bool counts() const;  // else LibTorch does
  std::size_t live() const;

  c10::Device device_;
  c10::Allocator* before_ = nullptr;
  std::size_t live_at_start_ = 0;
};

}  // namespace birkhoff
