#include "launcher/measure/peak_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>
#include <memory>

namespace birkhoff {
namespace {

// Bytes in use, and their peak.
struct Count {
  void add(std::size_t bytes) {
    const std::size_t now = live += bytes;
    for (std::size_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) {
    }
  }
  std::atomic<std::size_t> live{0}, peak{0};
};
Count count;

// LibTorch's own allocation, which also counts the bytes in use. The size of a block is stored
// before it, because oneDNN requires allocations that can be freed by their address.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* block = static_cast<std::byte*>(c10::alloc_cpu(bytes + c10::gAlignment));
    std::memcpy(block, &bytes, sizeof bytes);
    count.add(bytes);
    std::byte* const data = block + c10::gAlignment;
    return {data, data, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) {
    std::byte* const block = static_cast<std::byte*>(data) - c10::gAlignment;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof bytes);
    count.live -= bytes;
    c10::free_cpu(block);
  }
};

// Counts the bytes that tensors without memory would have.
class MetaAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    count.add(bytes);
    return {nullptr, new std::size_t(bytes), &release, c10::DeviceType::Meta};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  static void release(void* context) {
    const std::unique_ptr<std::size_t> bytes(static_cast<std::size_t*>(context));
    count.live -= *bytes;
  }
};

// Tensors may outlive main.
c10::Allocator* counting_allocator(c10::Device device) {
  static auto* const on_cpu = new CountingAllocator;
  static auto* const without_memory = new MetaAllocator;
  return device.is_cpu() ? static_cast<c10::Allocator*>(on_cpu) : without_memory;
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
  if (!counts()) return;
  before_ = c10::GetAllocator(device_.type());
  c10::SetAllocator(device_.type(), counting_allocator(device_), /*priority=*/1);
}

PeakMemory::~PeakMemory() {
  if (counts()) c10::SetAllocator(device_.type(), before_, /*priority=*/1);
}

bool PeakMemory::counts() const { return device_.is_cpu() || device_.is_meta(); }

void PeakMemory::restart() {
  if (counts()) {
    count.peak = count.live.load();
  } else {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  }
  live_at_start_ = live();
}

std::size_t PeakMemory::live() const {
  return counts()
             ? count.live.load()
             : static_cast<std::size_t>(allocated(device_, &c10::CachingAllocator::Stat::current));
}

std::int64_t PeakMemory::live_bytes() const {
  return static_cast<std::int64_t>(live()) - static_cast<std::int64_t>(live_at_start_);
}

std::size_t PeakMemory::extra_bytes() const {
  const std::size_t peak =
      counts() ? count.peak.load()
               : static_cast<std::size_t>(allocated(device_, &c10::CachingAllocator::Stat::peak));
  return peak - live_at_start_;
}

}  // namespace birkhoff
