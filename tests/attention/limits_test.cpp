// The limits of attention/kernels/common/limits.h equal the limits of configurations. A balance
// without gradients needs the same memory for any number of iterations.
#include "attention/kernels/common/limits.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "configs/loader/check.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

// Bytes of tensors and of operator new: allocated now, and at the peak.
std::atomic<std::int64_t> live_bytes{0}, peak_bytes{0};

void count(std::int64_t bytes) {
  const std::int64_t live = live_bytes += bytes;
  for (std::int64_t peak = peak_bytes;
       peak < live && !peak_bytes.compare_exchange_weak(peak, live);) {
  }
}

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  count(static_cast<std::int64_t>(malloc_usable_size(memory)));
  return memory;
}

void release(void* memory) {
  if (memory != nullptr) count(-static_cast<std::int64_t>(malloc_usable_size(memory)));
  std::free(memory);
}

struct TensorCount : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                         c10::Device) override {
    count(bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace
}  // namespace birkhoff

// The other forms of operator new and delete call these.
void* operator new(std::size_t bytes) { return birkhoff::counted(std::malloc(bytes)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto unit = static_cast<std::size_t>(alignment);
  return birkhoff::counted(std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit));
}
void operator delete(void* memory) noexcept { birkhoff::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { birkhoff::release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { birkhoff::release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  birkhoff::release(memory);
}

namespace birkhoff {
namespace {

std::int64_t peak_of(const std::function<void()>& work) {
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                  std::make_shared<TensorCount>());
  const std::int64_t before = live_bytes;
  peak_bytes = before;
  work();
  return peak_bytes - before;
}

using Work = std::function<at::Tensor(const at::Tensor&, std::int64_t)>;

// Each balance on each path, with scores that the kernels solve and with scores that they do not.
void for_each_balance(
    const std::function<void(const std::string&, const Work&, const at::Tensor&)>& run) {
  const at::Tensor scores = at::randn({2, 2, 24, 24}, at::kDouble);
  for (const double scale : {1.0, 1000.0}) {
    for (const Path path : {Path::kReference, Path::kFused}) {
      const std::string name = std::string(path == Path::kFused ? "fused" : "reference") +
                               (scale > 1 ? ", wide scores" : "");
      run(
          "balance, " + name,
          [path](const at::Tensor& s, std::int64_t n) { return balance(s, n, path); },
          scores * scale);
      run(
          "prefix, " + name,
          [path](const at::Tensor& s, std::int64_t n) { return prefix_balance(s, n, 0, path); },
          scores * scale);
      run(
          "cumulative, " + name,
          [path](const at::Tensor& s, std::int64_t n) { return cumulative_balance(s, n, path); },
          (scores * scale)
              .masked_fill(at::ones({24, 24}, at::kBool).triu(),
                           -std::numeric_limits<double>::infinity()));
    }
  }
}

TEST(BalanceMemory, DoesNotGrowWithIterationsWhereNoGradientIsAskedFor) {
  // malloc rounds sizes. One vector per matrix for each iteration would be nine times as much.
  constexpr std::int64_t kRounding = 1024;
  at::set_num_threads(1);
  for_each_balance([](const std::string& name, const Work& work, const at::Tensor& scores) {
    SCOPED_TRACE(name);
    const auto peak = [&](std::int64_t iterations, const at::Tensor& s) {
      work(s, iterations);  // LibTorch's one-time allocations
      return peak_of([&] { work(s, iterations); });
    };
    const std::int64_t few = peak(2, scores);
    EXPECT_GE(few, static_cast<std::int64_t>(scores.nbytes()));
    EXPECT_LE(peak(50, scores), few + kRounding);
    const at::Tensor leaf = scores.clone().requires_grad_();
    const c10::AutoGradMode without_gradients(false);
    EXPECT_LE(peak(50, leaf), peak(2, leaf) + kRounding);
  });
}

TEST(BalanceMemory, IsCounted) {
  const std::int64_t bytes = 1 << 20;
  EXPECT_GE(peak_of([&] { at::empty({bytes}, at::kByte); }), bytes);
  EXPECT_GE(peak_of([&] { std::vector<char>(bytes).front() = 1; }), bytes);
}

// The bits are the same with and without gradients.
TEST(BalanceMemory, KeepingLessChangesNoBit) {
  for_each_balance([](const std::string& name, const Work& work, const at::Tensor& scores) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(at::equal(work(scores.clone().requires_grad_(), 7).detach(), work(scores, 7)));
  });
}

TEST(Limits, AreThoseOfConfigurations) {
  const auto range = [](const google::protobuf::Message& message, const std::string& field) {
    return Range(
        message.GetDescriptor()->FindFieldByName(field)->options().GetExtension(configs::range));
  };
  const auto expect_most = [](const Range& allowed, std::int64_t most) {
    EXPECT_TRUE(allowed.contains(static_cast<double>(most)));
    EXPECT_FALSE(allowed.contains(static_cast<double>(most + 1)));
  };
  expect_most(range(configs::SinkhornAttention(), "block"), kMaxBlockTokens);
  expect_most(range(configs::BlockLocalAttention(), "block"), kMaxBlockTokens);
  expect_most(range(configs::SinkhornAttention(), "iterations"), kMaxIterations);
}

}  // namespace
}  // namespace birkhoff
