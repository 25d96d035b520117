// Rows that the loader announces to the system before it reads them.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "data/corpus/shard_reader.h"
#include "data/loader/loader.h"
#include "data/loader/token_windows.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

struct ReadLog {
  std::vector<std::int64_t> announced, read;
  bool all_before = true;
};

// The rows that a loader announces and reads in 1,000 batches, of which `first` delays the first.
ReadLog read_after(const std::function<void()>& first) {
  class Slow : public SampleSource {
   public:
    Slow(std::shared_ptr<ReadLog> log, std::function<void()> first)
        : log_(std::move(log)), first_(std::move(first)) {}
    std::int64_t num_samples() const override { return 100000; }
    Batch make_batch(std::int64_t rows) const override {
      Batch batch;
      batch.sample_ids_B = at::empty({rows}, at::kLong);
      return batch;
    }
    void fill(Batch& batch, const std::vector<Row>& rows) override {
      if (log_->read.empty()) first_();
      for (const Row& row : rows) {
        log_->read.push_back(row.sample);
        log_->all_before &= std::ranges::count(log_->announced, row.sample) == 1;
      }
      batch.sample_ids_B.fill_(0);
    }
    void will_fill(const std::vector<Row>& rows) override {
      for (const Row& row : rows) log_->announced.push_back(row.sample);
    }

   private:
    const std::shared_ptr<ReadLog> log_;
    const std::function<void()> first_;
  };
  const LoaderOptions options{.batches = {.global_batch = 8, .seed = 5, .rank = 1, .size = 2}};
  const auto log = std::make_shared<ReadLog>();
  {
    TrainLoader loader(std::make_unique<Slow>(log, first), options, 0);
    for (int i = 0; i < 1000; ++i) loader.next();
  }
  return *log;
}

// After a batch that had to wait, all rows are announced: each once, in order, and before it is
// read. It goes on while no other waits, because announcing is the reason.
TEST(ReadAhead, AnnouncesRowsOnceOneHadToWait) {
  const ReadLog log =
      read_after([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  EXPECT_TRUE(log.all_before);
  ASSERT_GE(log.announced.size(), log.read.size() + 508);
  EXPECT_TRUE(std::equal(log.read.begin(), log.read.end(), log.announced.begin()));
}

// A batch that computed for long, or had no CPU, says nothing about later rows.
TEST(ReadAhead, AnnouncesOnlyTheFirstRowsWhereNoneWaited) {
  const ReadLog log = read_after([] {
    using Clock = std::chrono::steady_clock;
    for (const auto start = Clock::now(); Clock::now() - start < std::chrono::milliseconds(20);) {
    }
  });
  EXPECT_FALSE(log.all_before);
  EXPECT_LT(log.announced.size(), 600u);
}

// Announcing changes nothing that is read, in rows of any shard, and finds missing files.
TEST(ReadAhead, LeavesRowsAsTheyAre) {
  TemporaryFolder folder;
  const std::string pixels = write_image_corpus(folder / "corpus", 100, 30);
  const Corpus corpus(folder / "corpus");
  ShardSequence images(corpus, corpus.record("train", "image"));
  images.will_read(25, 40);
  images.will_read(99, 1);
  std::string read(pixels.size(), '\0');
  images.read_bytes(0, 100, read.data());
  EXPECT_EQ(read, pixels);
  expect_error(ExitCode::kInternal, [&] { images.will_read(99, 2); }, {"outside"});
  remove_file(folder / "corpus/train-image-00001.h5");
  ShardSequence missing(corpus, corpus.record("train", "image"));
  missing.will_read(0, 30);
  expect_error(ExitCode::kData, [&] { missing.will_read(30, 1); }, {"train-image-00001.h5"});
}

}  // namespace
}  // namespace birkhoff
