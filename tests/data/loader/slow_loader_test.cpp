// The loader on slow file systems: several threads read.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "cluster/base/error.h"
#include "tests/data/loader/loader_fixture.h"

namespace birkhoff {
namespace {

// A source whose rows take time, as on a slow file system. One sample may be damaged.
class SlowSource : public SampleSource {
 public:
  SlowSource(std::unique_ptr<SampleSource> source, std::chrono::microseconds delay,
             std::int64_t damaged = -1)
      : source_(std::move(source)), delay_(delay), damaged_(damaged) {}
  std::int64_t num_samples() const override { return source_->num_samples(); }
  Batch make_batch(std::int64_t rows) const override { return source_->make_batch(rows); }
  void fill(Batch& batch, const std::vector<Row>& rows) override {
    {
      const std::lock_guard lock(mutex_);
      threads.insert(std::this_thread::get_id());
    }
    for (const Row& row : rows) {
      std::this_thread::sleep_for(delay_);
      if (row.id == damaged_) fail(ExitCode::kData, "sample {} is damaged", row.id);
    }
    source_->fill(batch, rows);
  }
  std::set<std::thread::id> threads;

 private:
  const std::unique_ptr<SampleSource> source_;
  const std::chrono::microseconds delay_;
  const std::int64_t damaged_;
  std::mutex mutex_;
};

using std::chrono::microseconds;

TEST_F(LoaderTest, ManyReadersReadWhatOneReads) {
  const Options in = options(10, 7);
  WindowLoader one(*corpus_, in, 0);
  auto slow =
      std::make_unique<SlowSource>(training_windows(*corpus_, in.windows), microseconds(2000));
  const SlowSource& source = *slow;
  LoaderOptions of_many = in.loader;
  of_many.max_readers = 5;  // does not divide 7
  {
    TrainLoader many(std::move(slow), of_many, 0);
    for (int step = 0; step < 60; ++step) {  // several epochs
      const Batch batch = many.next(), expected = one.next();
      ASSERT_EQ(sample_ids(batch), sample_ids(expected));
      ASSERT_EQ(inputs_of(batch), inputs_of(expected));
    }
    EXPECT_EQ(source.threads.size(), 5u);
  }
}

// A reader that keeps up stays alone.
TEST_F(LoaderTest, ReadersAreAddedOnlyWhileTrainingWaits) {
  const Options in = options(10, 7);
  auto slow =
      std::make_unique<SlowSource>(training_windows(*corpus_, in.windows), microseconds(100));
  const SlowSource& source = *slow;
  LoaderOptions of_many = in.loader;
  of_many.max_readers = 64;
  TrainLoader loader(std::move(slow), of_many, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (int step = 0; step < 10; ++step) {
    loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(source.threads.size(), 1u);
}

TEST_F(LoaderTest, BatchesBeforeADamagedOneAreReturned) {
  for (const int max_readers : {1, 8}) {
    const Options in = options(10, 7);
    LoaderOptions with_readers = in.loader;
    with_readers.max_readers = max_readers;
    TrainLoader loader(std::make_unique<SlowSource>(training_windows(*corpus_, in.windows),
                                                    microseconds(3000), /*damaged=*/7 * 6 + 3),
                       with_readers, 0);
    for (int step = 0; step < 6; ++step) {
      EXPECT_EQ(sample_ids(loader.next()).front(), 7 * step) << max_readers;
    }
    for (int again = 0; again < 2; ++again) {
      try {
        loader.next();
        ADD_FAILURE() << "a batch with a damaged sample";
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "sample 45 is damaged");
      }
    }
  }
}

// 50 ms for each read, and 2 and 50 MB/s of images of 64 x 64 pixels: after some steps, training
// hardly waits.
TEST_F(LoaderTest, ReadsStayAheadOnASlowFileSystem) {
  using Clock = std::chrono::steady_clock;
  for (const double bytes_per_second : {2e6, 50e6}) {
    constexpr int kBatch = 64, kSteps = 60;
    const Options in = options(10, kBatch);
    LoaderOptions with_readers = in.loader;
    with_readers.max_readers = 512;
    with_readers.prefetch = 8;
    TrainLoader loader(std::make_unique<SlowSource>(training_windows(*corpus_, in.windows),
                                                    std::chrono::milliseconds(50)),
                       with_readers, 0);
    const std::chrono::duration<double> compute(kBatch * 64 * 64 * 3 / bytes_per_second);
    std::chrono::duration<double> waited{}, lasted{};
    const int steps = bytes_per_second > 1e7 ? 10 + kSteps : 10 + 5;
    for (int step = 0; step < steps; ++step) {
      const auto start = Clock::now();
      loader.next();
      const auto got = Clock::now();
      std::this_thread::sleep_until(got + compute);
      if (step < 10) continue;
      waited += got - start;
      lasted += Clock::now() - start;
    }
    EXPECT_LE(waited / lasted, 0.005) << bytes_per_second << " bytes per second";
  }
}

}  // namespace
}  // namespace birkhoff
