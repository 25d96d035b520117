// Memory of tensors, counted.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>

namespace birkhoff::test {

// Counts the bytes that tensors take, freed or not.
class CountedBytes : public c10::Allocator {
 public:
  CountedBytes() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, /*priority=*/1); }
  ~CountedBytes() override { c10::SetCPUAllocator(before_, /*priority=*/1); }

  c10::DataPtr allocate(std::size_t bytes) override {
    total_ += bytes;
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }
  std::size_t total() const { return total_; }

 private:
  c10::Allocator* before_;
  std::atomic<std::size_t> total_{0};
};

}  // namespace birkhoff::test
