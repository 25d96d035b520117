// On the CPU batches pass unchanged, and the loader's time is reported. GPUs:
// device_prefetcher_gpu_test.cpp.
#include "runtime/device_prefetcher.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace birkhoff {
namespace {

TEST(DevicePrefetcher, OnTheCpuBatchesPassWhenTheyAreAskedFor) {
  std::int64_t made = 0;
  DevicePrefetcher feed(
      [&] {
        Batch batch;
        batch.sample_ids_B = at::full({3}, made++, at::kLong);
        return batch;
      },
      at::kCPU);
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(feed.next()->sample_ids_B[0].item<std::int64_t>(), i);
    feed.prefetch();
    EXPECT_EQ(made, i + 1) << "nothing is prefetched: the loader does that";
  }
}

TEST(DevicePrefetcher, TellsHowLongTheLoaderTook) {
  using std::chrono::steady_clock;
  DevicePrefetcher feed(
      [] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return Batch{};
      },
      at::kCPU);
  EXPECT_EQ(feed.waited_ms(), 0);
  const auto start = steady_clock::now();
  feed.next();
  feed.next();
  const std::chrono::duration<double, std::milli> whole = steady_clock::now() - start;
  EXPECT_GE(feed.waited_ms(), 40);
  EXPECT_LE(feed.waited_ms(), whole.count());
}

}  // namespace
}  // namespace birkhoff
