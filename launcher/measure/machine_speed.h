// The time of work on a device, and what the device can do. Local.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/gpu/device.h"
#include "launcher/measure/report.h"

namespace birkhoff {

// Measures the seconds of `work` on an otherwise idle device. On a GPU, the L2 cache holds none of
// the work's tensors at the start, and the host runs ahead of the device.
class Stopwatch {
 public:
  explicit Stopwatch(at::Device device) : device_(device) {
    if (device_.is_cuda()) flushed_ = at::zeros({64 << 20}, at::device(device_).dtype(at::kFloat));
  }
  template <typename Work>
  double seconds(const Work& work) const {
    if (device_.is_cpu()) {
      const double start = clock_seconds();
      work();
      return clock_seconds() - start;
    }
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    c10::Event before(device_.type(), c10::EventFlag::BACKEND_DEFAULT),
        after(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    synchronize(device_);
    // Flush by reading: written data would go to memory while the work is timed.
    flushed_.sum();
    before.record(stream);
    work();
    after.record(stream);
    synchronize(device_);
    return before.elapsedTime(after) / 1e3;
  }

 private:
  at::Device device_;
  at::Tensor flushed_;
};

// The speed of products of large matrices, measured in turns with what is compared with it. The
// first measurement also warms up.
class ProductSpeed {
 public:
  ProductSpeed(at::ScalarType dtype, at::Device device)
      : size_(device.is_cuda() ? 8192 : 1024),
        // On a CPU without fp16 instructions, LibTorch's fp16 products are far from what the CPU
        // can do.
        a_(at::randn({size_, size_}, at::device(device))
               .to(device.is_cpu() && dtype == at::kHalf ? at::kFloat : dtype)) {}
  void measure(const Stopwatch& watch) {
    const auto seconds_of = [&](int count) {
      return watch.seconds([&] {
        for (int i = 0; i < count; ++i) at::mm(a_, a_);
      }) / count;
    };
    // A GPU's clocks are those of long work only after a while.
    constexpr double kSeconds = 0.03;
    if (count_ == 0) {
      const double first = seconds_of(1);
      count_ = a_.is_cuda() ? static_cast<int>(std::clamp(kSeconds / first, 1.0, 50.0)) : 1;
    }
    seconds_.push_back(seconds_of(count_));
  }
  // The median of these measurements, of which there must be at least one.
  double flops_per_second() const {
    return 2 * std::pow(static_cast<double>(size_), 3) / median(seconds_);
  }
  // "at::mm on 8192x8192 of BFloat16 (700 TFLOP/s)"
  std::string text() const {
    return fmt::format("at::mm on {0}x{0} of {1} ({2:.4g} TFLOP/s)", size_,
                       c10::toString(a_.scalar_type()), flops_per_second() / 1e12);
  }

 private:
  std::int64_t size_;
  int count_ = 0;  // of products in a measurement
  at::Tensor a_;
  std::vector<double> seconds_;
};

// The same, and the speed of copies.
class MachineSpeed {
 public:
  // dtype: of the products.
  MachineSpeed(at::ScalarType dtype, at::Device device)
      : products_(dtype, device),
        from_(
            at::empty({(device.is_cuda() ? 512 : 64) << 20}, at::device(device).dtype(at::kByte))),
        to_(at::empty_like(from_)) {
    from_.fill_(1);
  }
  void measure(const Stopwatch& watch) {
    products_.measure(watch);
    copies_.push_back(watch.seconds([&] { to_.copy_(from_); }));
  }
  // The medians of these measurements, of which there must be at least one.
  double flops_per_second() const { return products_.flops_per_second(); }
  double bytes_per_second() const {
    return 2 * static_cast<double>(from_.numel()) / median(copies_);
  }
  // The least time that this work takes at these speeds.
  double floor_seconds(double flops, double bytes) const {
    return std::max(flops / flops_per_second(), bytes / bytes_per_second());
  }
  std::string text() const {
    return fmt::format("{} and of a copy ({:.4g} GB/s)", products_.text(),
                       bytes_per_second() / 1e9);
  }

 private:
  ProductSpeed products_;
  at::Tensor from_, to_;
  std::vector<double> copies_;
};

}  // namespace birkhoff
