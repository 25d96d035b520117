#include "launcher/bench/peak_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>

namespace birkhoff {
namespace {

// LibTorch's own allocation, which also counts the bytes in use. The size of a block is stored
// before it, because oneDNN requires allocations that can be freed by their address.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* block = static_cast<std::byte*>(c10::alloc_cpu(bytes + c10::gAlignment));
    std::memcpy(block, &bytes, sizeof bytes);
    const std::size_t live = live_ += bytes;
    for (std::size_t peak = peak_; peak < live && !peak_.compare_exchange_weak(peak, live);) {
    }
    std::byte* const data = block + c10::gAlignment;
    return {data, data, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::size_t live() const { return live_; }
  std::size_t peak() const { return peak_; }
  void restart() { peak_ = live_.load(); }

 private:
  static void release(void* data);
  std::atomic<std::size_t> live_{0}, peak_{0};
};

CountingAllocator& counting_allocator() {
  static auto* counting = new CountingAllocator;  // tensors may outlive main
  return *counting;
}

void CountingAllocator::release(void* data) {
  std::byte* const block = static_cast<std::byte*>(data) - c10::gAlignment;
  std::size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof bytes);
  counting_allocator().live_ -= bytes;
  c10::free_cpu(block);
}

const auto kAllPools = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

std::int64_t allocated(c10::Device device, std::int64_t c10::CachingAllocator::Stat::*what) {
  return c10::getDeviceAllocator(device.type())
             ->getDeviceStats(device.index())
             .allocated_bytes[kAllPools].*
         what;
}

}  // namespace

PeakMemory::PeakMemory(c10::Device device) : device_(device) {
  if (!device_.is_cpu()) return;
  before_ = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting_allocator(), /*priority=*/1);
}

PeakMemory::~PeakMemory() {
  if (before_) c10::SetCPUAllocator(before_, /*priority=*/1);
}

void PeakMemory::restart() {
  if (device_.is_cpu()) {
    counting_allocator().restart();
  } else {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  }
  live_at_start_ = live();
}

std::size_t PeakMemory::live() const {
  return device_.is_cpu()
             ? counting_allocator().live()
             : static_cast<std::size_t>(allocated(device_, &c10::CachingAllocator::Stat::current));
}

std::int64_t PeakMemory::live_bytes() const {
  return static_cast<std::int64_t>(live()) - static_cast<std::int64_t>(live_at_start_);
}

std::size_t PeakMemory::extra_bytes() const {
  const std::size_t peak =
      device_.is_cpu()
          ? counting_allocator().peak()
          : static_cast<std::size_t>(allocated(device_, &c10::CachingAllocator::Stat::peak));
  return peak - live_at_start_;
}

}  // namespace birkhoff
