// The loader on slow file systems: several threads read.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "data/loader/image_records.h"
#include "tests/data/loader/loader_fixture.h"
#include "tests/peak_memory.h"

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
  Options in = options(10, 7);
  in.windows.restart_at_documents = true;
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
      const at::Tensor& segments = batch.at(field::kSegments);
      ASSERT_EQ(batch.num_documents, segments.max().item<std::int32_t>() + 1);
      ASSERT_EQ(batch.num_documents, expected.num_documents);
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

// The share of its time that training waits for a source if it uses up images of 64 x 64 pixels at
// this rate, in `steps` steps after the first ten. The first sample has position `consumed`.
double share_of_waits(std::unique_ptr<SampleSource> source, const LoaderOptions& options,
                      double bytes_per_second, int steps, std::int64_t consumed) {
  using Clock = std::chrono::steady_clock;
  TrainLoader loader(std::move(source), options, consumed);
  const auto batch = static_cast<double>(options.batches.global_batch);
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

// Each read takes 50 ms: of a source without a page cache, to which hundreds of threads read; or,
// with BIRKHOFF_SLOW_FOLDER, of the images of the corpus that it names, on a file system that is
// that slow (slow_folder.cpp), with the default options. No trial reads what another has read,
// because that is in the page cache.
TEST_F(LoaderTest, ReadsStayAheadOnASlowFileSystem) {
  const char* const folder = std::getenv("BIRKHOFF_SLOW_FOLDER");
  const bool is_folder = folder != nullptr;
  const Options in = options(10, 64);
  LoaderOptions with_readers = in.loader;
  with_readers.max_readers = is_folder ? configs::Data().readers() : 512;
  with_readers.prefetch = is_folder ? configs::Data().prefetch() : 8;
  const auto source = [&]() -> std::unique_ptr<SampleSource> {
    if (is_folder) return image_records(Corpus(folder), {.label = "label"});
    return std::make_unique<SlowSource>(training_windows(*corpus_, in.windows),
                                        std::chrono::milliseconds(50));
  };
  std::int64_t consumed = 0;
  const std::int64_t memory = peak_memory(/*reset=*/true);
  for (const auto& [bytes_per_second, seconds] : {std::pair(2e6, 2), {50e6, 1}}) {
    const int steps =
        static_cast<int>((is_folder ? 10 : seconds) * bytes_per_second / (64 * 64 * 64 * 3));
    // Other programs only add waits, and a loader that is too slow waits in each trial: the least
    // of several shares is the loader's own.
    double least = 1;
    for (int trial = 0; trial < (is_folder ? 3 : 6) && least > 0.005; ++trial) {
      const double share =
          share_of_waits(source(), with_readers, bytes_per_second, steps, consumed);
      if (is_folder) {
        fmt::print("slow_folder: at {} MB/s a step waits {:.3f} % of its time\n",
                   bytes_per_second / 1e6, 100 * share);
      }
      least = std::min(least, share);
      consumed += (steps + 20) * with_readers.batches.global_batch;
    }
    EXPECT_LE(least, 0.005) << bytes_per_second << " bytes per second";
  }
  if (!is_folder) return;
  ASSERT_LE(consumed, source()->num_samples()) << "the corpus is too small";
  // 16 batches of 0.8 MB, page tables of 1.6 MB, and up to 1.5 MB of stack and heap for each of 16
  // threads.
  const double grown = static_cast<double>(peak_memory(/*reset=*/false) - memory) / 1e6;
  fmt::print("slow_folder: tried 2 rates, memory grew by {:.1f} MB\n", grown);
  EXPECT_LT(grown, 40);
}

}  // namespace
}  // namespace birkhoff
