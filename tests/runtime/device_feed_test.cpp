// On the CPU batches pass as they are, and what the loader takes is told. GPUs:
// device_feed_gpu_test.cpp.
#include "runtime/device_feed.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace birkhoff {
namespace {

TEST(DeviceFeed, OnTheCpuBatchesPassWhenTheyAreAskedFor) {
  std::int64_t made = 0;
  DeviceFeed feed(
      [&] {
        Batch batch;
        batch.sample_ids_B = at::full({3}, made++, at::kLong);
        return batch;
      },
      at::kCPU);
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(feed.next().sample_ids_B[0].item<std::int64_t>(), i);
    feed.prefetch();
    EXPECT_EQ(made, i + 1) << "none ahead: the loader is";
  }
}

TEST(DeviceFeed, TellsHowLongTheLoaderTook) {
  using std::chrono::steady_clock;
  DeviceFeed feed(
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
