// The loader on slow file systems: several threads read.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

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

// The share of its time that training waits for a source that takes 50 ms for each row, if it uses
// up images of 64 x 64 pixels at this rate; after ten steps.
double share_of_waits(std::unique_ptr<SampleSource> source, const LoaderOptions& options,
                      double bytes_per_second, int steps) {
  using Clock = std::chrono::steady_clock;
  TrainLoader loader(std::make_unique<SlowSource>(std::move(source), std::chrono::milliseconds(50)),
                     options, 0);
  const auto batch = static_cast<double>(options.global_batch);
  const std::chrono::duration<double> compute(batch * 64 * 64 * 3 / bytes_per_second);
  std::chrono::duration<double> waited{}, lasted{};
  for (int step = 0; step < 10 + steps; ++step) {
    const auto start = Clock::now();
    loader.next();
    const auto got = Clock::now();
    std::this_thread::sleep_until(got + compute);
    if (step < 10) continue;
    waited += got - start;
    lasted += Clock::now() - start;
  }
  return waited / lasted;
}

// The best of some trials: other programs may keep this one waiting, too.
TEST_F(LoaderTest, ReadsStayAheadOnASlowFileSystem) {
  const Options in = options(10, 64);
  LoaderOptions with_readers = in.loader;
  with_readers.max_readers = 512;
  with_readers.prefetch = 8;
  for (const auto& [bytes_per_second, steps] : {std::pair(2e6, 5), {50e6, 60}}) {
    double best = 1;
    for (int trial = 0; trial < 6 && best > 0.005; ++trial) {
      best = std::min(best, share_of_waits(training_windows(*corpus_, in.windows), with_readers,
                                           bytes_per_second, steps));
    }
    EXPECT_LE(best, 0.005) << bytes_per_second << " bytes per second";
  }
}

}  // namespace
}  // namespace birkhoff
