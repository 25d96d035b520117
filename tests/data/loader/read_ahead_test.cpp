// Rows that the loader announces to the system before it reads them.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "data/corpus/shard_reader.h"
#include "data/loader/loader.h"
#include "data/loader/token_windows.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

// After a batch that took long, all rows are announced: each once, in order, and before it is read.
// It goes on while no other takes long, because announcing is the reason.
TEST(ReadAhead, AnnouncesRowsOnceOneTookLong) {
  struct Log {
    std::vector<std::int64_t> announced, read;
    bool all_before = true;
  };
  class Slow : public SampleSource {
   public:
    explicit Slow(std::shared_ptr<Log> log) : log_(std::move(log)) {}
    std::int64_t num_samples() const override { return 100000; }
    Batch make_batch(std::int64_t rows) const override {
      Batch batch;
      batch.sample_ids_B = at::empty({rows}, at::kLong);
      return batch;
    }
    void fill(Batch& batch, const std::vector<Row>& rows) override {
      if (log_->read.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
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
    const std::shared_ptr<Log> log_;
  };
  const LoaderOptions options{.batches = {.global_batch = 8, .seed = 5, .rank = 1, .size = 2}};
  const auto log = std::make_shared<Log>();
  {
    TrainLoader loader(std::make_unique<Slow>(log), options, 0);
    for (int i = 0; i < 1000; ++i) loader.next();
  }
  EXPECT_TRUE(log->all_before);
  ASSERT_GE(log->announced.size(), log->read.size() + 508);
  EXPECT_TRUE(std::equal(log->read.begin(), log->read.end(), log->announced.begin()));
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
