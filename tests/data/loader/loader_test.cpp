// Legend: B batch, T tokens.
#include "data/loader/loader.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cluster/base/error.h"
#include "data/corpus/manifest.h"
#include "data/loader/token_windows.h"
#include "tests/data/loader/loader_fixture.h"

namespace birkhoff {
namespace {

TEST_F(LoaderTest, RowsAreTheTokensOfTheirSample) {
  WindowLoader loader(*corpus_, options(10, 7), 0);
  ASSERT_EQ(num_training_windows(*corpus_, options(10, 7).windows), 100);  // (1003 - 1) / 10
  std::map<std::int64_t, int> firsts;
  for (int step = 0; step < 100; ++step) {  // seven epochs
    const Batch batch = loader.next();
    ASSERT_EQ(batch.size(), 7);
    ASSERT_EQ(batch.global_size, 7);
    for (std::int64_t b = 0; b < 7; ++b) {
      EXPECT_EQ(sample_ids(batch)[static_cast<std::size_t>(b)],
                step * 7 + b);  // epoch * samples + position
      const Numbers inputs = row<std::int64_t>(batch, field::kInputs, b),
                    targets = row<std::int64_t>(batch, field::kTargets, b);
      std::int64_t sample = 0;
      while (sample < 100 &&
             (inputs[0] != byte_at(sample * 10) || inputs[9] != byte_at(sample * 10 + 9)))
        ++sample;
      ASSERT_LT(sample, 100);
      ++firsts[sample];
      for (std::int64_t t = 0; t < 10; ++t) {
        ASSERT_EQ(inputs[static_cast<std::size_t>(t)], byte_at(sample * 10 + t));
        ASSERT_EQ(targets[static_cast<std::size_t>(t)], byte_at(sample * 10 + t + 1));
      }
      EXPECT_EQ(row<std::uint8_t>(batch, field::kMask, b), std::vector<std::uint8_t>(10, 1));
    }
    EXPECT_FALSE(batch.has(field::kSegments));
  }
  ASSERT_EQ(firsts.size(), 100u);  // every sample once per epoch
  for (const auto& [sample, count] : firsts) EXPECT_EQ(count, 7) << sample;
}

// A source whose second batch comes only once `gate` opens.
class StuckSource : public SampleSource {
 public:
  explicit StuckSource(std::shared_future<void> gate) : gate_(std::move(gate)) {}
  std::int64_t num_samples() const override { return 4; }
  Batch make_batch(std::int64_t rows) const override {
    Batch batch;
    batch.sample_ids_B = at::zeros({rows}, at::kLong);
    return batch;
  }
  void fill(Batch&, const std::vector<Row>&) override {
    if (++num_filled_ == 2) gate_.wait();
  }

 private:
  const std::shared_future<void> gate_;
  int num_filled_ = 0;
};

TEST(TrainLoader, CanBeLeftWhileItWaits) {
  std::promise<void> gate;
  {
    TrainLoader loader(std::make_unique<StuckSource>(gate.get_future().share()),
                       {.batches = {.global_batch = 2}}, 0);
    int asked = 0;
    const auto gives_up = [&] { return ++asked == 3; };
    loader.next();
    EXPECT_FALSE(loader.next(gives_up));
    EXPECT_EQ(asked, 3);
  }  // does not wait for the thread
  gate.set_value();
}

// A source whose lengths from its third sample on come only once `gate` opens.
class StuckLengths final : public StuckSource {
 public:
  explicit StuckLengths(const std::shared_future<void>& gate) : StuckSource(gate), gate_(gate) {}
  bool lengths_vary() const override { return true; }
  bool trims() const override { return true; }
  SampleLength length(std::int64_t) override {
    if (++num_lengths_ == 3) gate_.wait();
    return {.source = 1};
  }
  void fill(Batch&, const std::vector<Row>&) override {}

 private:
  const std::shared_future<void> gate_;
  int num_lengths_ = 0;
};

TEST(TrainLoader, CanBeLeftWhileABatchIsPlanned) {
  std::promise<void> gate;
  {
    TrainLoader loader(std::make_unique<StuckLengths>(gate.get_future().share()),
                       {.batches = {.global_batch = 2}}, 0);
    int asked = 0;
    const auto gives_up = [&] { return ++asked == 3; };
    loader.next();  // the one before, although the next is being planned
    EXPECT_FALSE(loader.next(gives_up));
    EXPECT_EQ(asked, 3);
  }  // does not wait for the thread
  gate.set_value();
}

TEST_F(LoaderTest, RanksTogetherReadWhatOneReads) {
  for (const int size : {2, 3, 4, 9}) {  // none of these divides 7; of 9 ranks, two get nothing
    WindowLoader whole(*corpus_, options(10, 7), 0);
    std::vector<std::unique_ptr<WindowLoader>> parts;
    for (int rank = 0; rank < size; ++rank) {
      parts.push_back(std::make_unique<WindowLoader>(*corpus_, options(10, 7, rank, size), 0));
    }
    for (int step = 0; step < 20; ++step) {
      const Batch expected = whole.next();
      Numbers ids, inputs;
      for (const auto& part : parts) {
        const Batch batch = part->next();
        for (const std::int64_t id : sample_ids(batch)) ids.push_back(id);
        for (const std::int64_t id : inputs_of(batch)) inputs.push_back(id);
      }
      ASSERT_EQ(ids, sample_ids(expected)) << size << " ranks";
      ASSERT_EQ(inputs, inputs_of(expected));
    }
  }
}

TEST_F(LoaderTest, ResumesAnywhere) {
  std::vector<Numbers> steps;
  {
    WindowLoader loader(*corpus_, options(10, 7), 0);
    for (int step = 0; step < 40; ++step) steps.push_back(inputs_of(loader.next()));
  }
  // The batches after 14 and 28 steps span two epochs.
  for (const int done : {1, 2, 13, 14, 15, 28, 39}) {
    WindowLoader resumed(*corpus_, options(10, 7), 7 * done);
    EXPECT_EQ(inputs_of(resumed.next()), steps[static_cast<std::size_t>(done)]) << done;
  }
}

// Elastic resumption: after some steps a different number of ranks continues. In each of two epochs
// every sample is read once, in the order in which a single rank would have read it.
TEST_F(LoaderTest, AnyTwoNumbersOfRanksReadEverySampleOnceAnEpoch) {
  constexpr std::int64_t kBatch = 12, kPerEpoch = 100, kSteps = 17;  // the last step leaves epoch 1
  const auto read_on = [&](int size, std::int64_t shards, std::int64_t first, std::int64_t last,
                           Numbers& ids, Numbers& inputs) {
    std::vector<std::unique_ptr<WindowLoader>> ranks;
    for (int rank = 0; rank < size; ++rank) {
      Options of_rank = options(10, kBatch, rank, size);
      of_rank.loader.batches.shards = shards;
      ranks.push_back(std::make_unique<WindowLoader>(*corpus_, of_rank, first * kBatch));
    }
    for (std::int64_t step = first; step < last; ++step) {
      for (const auto& rank : ranks) {
        const Batch batch = rank->next();
        for (const std::int64_t id : sample_ids(batch)) ids.push_back(id);
        for (const std::int64_t token : inputs_of(batch)) inputs.push_back(token);
      }
    }
  };
  Numbers expected_ids, expected_inputs;
  read_on(1, 0, 0, kSteps, expected_ids, expected_inputs);
  for (const int before : {1, 2, 3, 4, 6}) {
    for (const int after : {1, 2, 3, 4, 6}) {
      for (const std::int64_t shards : {0, 12}) {
        Numbers ids, inputs;
        const std::int64_t moved_after = 3 + before + after;
        read_on(before, shards, 0, moved_after, ids, inputs);
        read_on(after, shards, moved_after, kSteps, ids, inputs);
        ASSERT_EQ(ids, expected_ids) << before << " ranks, then " << after;
        ASSERT_EQ(inputs, expected_inputs) << before << " ranks, then " << after;
        std::map<std::int64_t, int> times;
        for (const std::int64_t id : ids) ++times[id];
        for (std::int64_t id = 0; id < 2 * kPerEpoch; ++id) {
          ASSERT_EQ(times[id], 1) << "sample " << id % kPerEpoch << " of epoch " << id / kPerEpoch;
        }
      }
    }
  }
}

// The memory of a batch is reused once nothing holds the batch, one of its fields or its rows.
TEST_F(LoaderTest, OnlyWhatIsLetGoOfIsFilledAgain) {
  const auto memory = [](const Batch& batch) { return batch.at(field::kInputs).const_data_ptr(); };
  WindowLoader loader(*corpus_, options(10, 7), 0), again(*corpus_, options(10, 7), 0);
  std::vector<Batch> held, rows;
  std::vector<at::Tensor> targets;
  std::set<const void*> let_go, used_again;
  for (int step = 0; step < 60; ++step) {
    const Batch batch = loader.next();
    if (let_go.count(memory(batch)) > 0) used_again.insert(memory(batch));
    switch (step % 4) {
      case 0:
        held.push_back(batch);
        break;
      case 1:
        rows.push_back(batch.narrow(3, 7));
        break;
      case 2:
        targets.push_back(batch.at(field::kTargets));
        break;
      default:
        let_go.insert(memory(batch));
    }
  }
  EXPECT_FALSE(used_again.empty());
  for (std::size_t step = 0; step < 60; ++step) {
    const Batch expected = again.next();
    if (step % 4 == 0) {
      ASSERT_EQ(inputs_of(held[step / 4]), inputs_of(expected));
    } else if (step % 4 == 1) {
      ASSERT_EQ(inputs_of(rows[step / 4]), inputs_of(expected.narrow(3, 7)));
    } else if (step % 4 == 2) {
      ASSERT_TRUE(targets[step / 4].equal(expected.at(field::kTargets)));
    }
  }
}

TEST_F(LoaderTest, EpochsDiffer) {
  WindowLoader loader(*corpus_, options(10, 100), 0);
  EXPECT_NE(inputs_of(loader.next()), inputs_of(loader.next()));
}

// Each later epoch has its own windows. They are complete and in stream order, and no two of them
// overlap except the last two.
TEST_F(LoaderTest, EpochsCutAtOtherPlaces) {
  Options shifted = options(10, 100);
  shifted.windows.shift_windows = true;
  WindowLoader loader(*corpus_, shifted, 0), plain(*corpus_, options(10, 100), 0);
  EXPECT_EQ(inputs_of(loader.next()), inputs_of(plain.next())) << "the first epoch is not shifted";
  std::set<std::int64_t> shifts;
  for (int epoch = 1; epoch < 20; ++epoch) {
    const Batch batch = loader.next();
    std::set<std::int64_t> firsts;
    for (std::int64_t b = 0; b < 100; ++b) {
      const Numbers inputs = row<std::int64_t>(batch, field::kInputs, b),
                    targets = row<std::int64_t>(batch, field::kTargets, b);
      std::int64_t first = 0;
      const auto is_here = [&] {
        for (std::int64_t t = 0; t < 10; ++t) {
          if (inputs[static_cast<std::size_t>(t)] != byte_at(first + t)) return false;
        }
        return true;
      };
      while (first <= kTokens - 11 && !is_here()) ++first;
      ASSERT_LE(first, kTokens - 11);
      EXPECT_EQ(targets[9], byte_at(first + 10));
      firsts.insert(first);
    }
    ASSERT_EQ(firsts.size(), 100u) << "no window twice";
    const std::int64_t shift = *firsts.begin();
    ASSERT_LT(shift, 10);
    std::int64_t place = 0;
    for (const std::int64_t first : firsts) {
      EXPECT_EQ(first, std::min<std::int64_t>(shift + 10 * place++, kTokens - 11));
    }
    shifts.insert(shift);
  }
  EXPECT_GE(shifts.size(), 5u);
}

TEST_F(LoaderTest, TooShortASplitSaysSo) {
  EXPECT_EQ(num_training_windows(*corpus_, options(1002, 1).windows), 1);
  expect_error(ExitCode::kData, [&] { WindowLoader loader(*corpus_, options(1003, 1), 0); },
               {"1003", "data.sequence_length"});
  expect_error(ExitCode::kData,
               [&] {
                 Options other = options(10, 1);
                 other.windows.split = "valid";
                 WindowLoader loader(*corpus_, other, 0);
               },
               {"valid"});
}

TEST_F(LoaderTest, TheThreadsErrorSurfacesInNextAgainAndAgain) {
  for (const auto& shard : corpus_->stream("train", "tokens").shard()) {
    const std::string path = folder_ / ("corpus/" + shard.file());
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(shard.values_offset());
    file.write("\x7f\x7f\x7f\x7f", 4);
  }
  WindowLoader loader(*corpus_, options(10, 7), 0);
  for (int twice = 0; twice < 2; ++twice)
    expect_error(ExitCode::kData, [&] { loader.next(); }, {"train-tokens-", "damaged"});
}

TEST_F(LoaderTest, EndsWhileTheThreadWaitsForRoom) {
  for (int trial = 0; trial < 5; ++trial) {
    Options small = options(10, 7);
    small.loader.prefetch = 1 + trial;
    WindowLoader loader(*corpus_, small, 0);
    if (trial % 2 == 0) loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the queue is probably full by now
  }
}

TEST_F(LoaderTest, WindowsCoverEveryTargetOnce) {
  for (const std::int64_t length : {10, 167, 334, 1001, 1002, 1003, 4096}) {
    const auto windows = evaluation_windows(*corpus_, options(length, 0).windows);
    ASSERT_EQ(windows->num_samples(), (1002 + length - 1) / length);
    const Batch batch = read_samples(*windows, 0, windows->num_samples());
    std::int64_t next = 1;
    for (std::int64_t b = 0; b < batch.size(); ++b) {
      const Numbers inputs = row<std::int64_t>(batch, field::kInputs, b),
                    targets = row<std::int64_t>(batch, field::kTargets, b);
      const auto mask = row<std::uint8_t>(batch, field::kMask, b);
      for (std::size_t t = 0; t < mask.size(); ++t) {
        if (mask[t] == 0) {
          EXPECT_EQ(next, kTokens);  // padding only after the end
          EXPECT_EQ(targets[t], 0);
          continue;
        }
        ASSERT_EQ(inputs[t], byte_at(next - 1));
        ASSERT_EQ(targets[t], byte_at(next));
        ++next;
      }
    }
    EXPECT_EQ(next, kTokens);
    if (windows->num_samples() > 2) {
      EXPECT_EQ(sample_ids(read_samples(*windows, 1, 3)), (Numbers{1, 2}));
      EXPECT_EQ(inputs_of(read_samples(*windows, 1, 2)), inputs_of(batch.narrow(1, 2)));
    }
  }
}

// Three documents "abc", "d", "efghij" (in the order of their names), each followed by the mark
// 256.
TEST(LoaderDocuments, RestartAtBorders) {
  TemporaryFolder folder;
  write_text(folder / "in/1", "abc");
  write_text(folder / "in/2", "d");
  write_text(folder / "in/3", "efghij");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.valid_fraction = 0;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  WindowOptions loading;
  loading.sequence_length = 8;
  loading.restart_at_documents = true;
  const auto windows = evaluation_windows(corpus, loading);
  ASSERT_EQ(windows->num_samples(), 2);  // 13 tokens, 12 targets
  const Batch batch = read_samples(*windows, 0, 2);
  EXPECT_EQ(row<std::int64_t>(batch, field::kInputs, 0),
            (Numbers{'a', 'b', 'c', 256, 'd', 256, 'e', 'f'}));
  EXPECT_EQ(row<std::int32_t>(batch, field::kSegments, 0),
            (std::vector<std::int32_t>{0, 0, 0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(row<std::int64_t>(batch, field::kPositions, 0), (Numbers{0, 1, 2, 3, 0, 1, 0, 1}));
  // With an end mark, the token after it counts.
  EXPECT_EQ(row<std::uint8_t>(batch, field::kMask, 0), (std::vector<std::uint8_t>(8, 1)));
  // The second window begins within a document, which is its first segment.
  EXPECT_EQ(row<std::int64_t>(batch, field::kInputs, 1),
            (Numbers{'g', 'h', 'i', 'j', 256, 0, 0, 0}));
  EXPECT_EQ(row<std::int64_t>(batch, field::kTargets, 1),
            (Numbers{'h', 'i', 'j', 256, 0, 0, 0, 0}));
  EXPECT_EQ(row<std::int32_t>(batch, field::kSegments, 1), (std::vector<std::int32_t>(8, 0)));
  EXPECT_EQ(row<std::int64_t>(batch, field::kPositions, 1), (Numbers{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(row<std::uint8_t>(batch, field::kMask, 1),
            (std::vector<std::uint8_t>{1, 1, 1, 1, 0, 0, 0, 0}));
}

// In corpora without an end mark (other tools may make them), the first token of a document is not
// a target.
TEST(LoaderDocuments, WithoutAnEndMarkTheFirstTokenIsNoTarget) {
  TemporaryFolder folder;
  write_text(folder / "in/1", "abc");
  write_text(folder / "in/2", "defg");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.valid_fraction = 0;
  prepare_corpus(options);
  const std::string path = folder / "corpus/manifest.json";
  configs::CorpusManifest manifest = parse_corpus_manifest(read_text(path), path);
  manifest.mutable_tokenizer()->clear_end_of_document();
  write_text(path, manifest_json(manifest));
  const Corpus corpus(folder / "corpus");
  WindowOptions loading;
  loading.sequence_length = 8;
  const auto flowing = read_samples(*evaluation_windows(corpus, loading), 0, 1);
  EXPECT_EQ(row<std::uint8_t>(flowing, field::kMask, 0), (std::vector<std::uint8_t>(8, 1)));
  loading.restart_at_documents = true;
  const auto restarting =
      read_samples(*evaluation_windows(corpus, loading), 0, 1);  // a b c 256 | d e f g 256
  EXPECT_EQ(row<std::uint8_t>(restarting, field::kMask, 0),
            (std::vector<std::uint8_t>{1, 1, 1, 0, 1, 1, 1, 1}));
}

// A document begins exactly where a window does: the window has one segment.
TEST(LoaderDocuments, BordersAtWindowBorders) {
  TemporaryFolder folder;
  write_text(folder / "in/1", "abc");
  write_text(folder / "in/2", "defghi");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.valid_fraction = 0;
  prepare_corpus(options);
  WindowOptions loading;
  loading.sequence_length = 4;
  loading.restart_at_documents = true;
  const Batch batch = read_samples(*evaluation_windows(Corpus(folder / "corpus"), loading), 0, 2);
  EXPECT_EQ(row<std::int64_t>(batch, field::kTargets, 0), (Numbers{'b', 'c', 256, 'd'}));
  EXPECT_EQ(row<std::int32_t>(batch, field::kSegments, 0), (std::vector<std::int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(row<std::int32_t>(batch, field::kSegments, 1), (std::vector<std::int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(row<std::int64_t>(batch, field::kPositions, 1), (Numbers{0, 1, 2, 3}));
}

TEST(Batch, NamesMissingFields) {
  TemporaryFolder folder;
  write_text(folder / "text", "some text");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"});
  options.valid_fraction = 0;
  prepare_corpus(options);
  WindowOptions loading;
  loading.sequence_length = 4;
  const Batch batch = read_samples(*evaluation_windows(Corpus(folder / "corpus"), loading), 0, 2);
  expect_error(ExitCode::kData, [&] { batch.at("labels"); }, {"'labels'", "inputs, mask, targets"});
  EXPECT_EQ(batch.narrow(1, 2).size(), 1);
  EXPECT_EQ(batch.narrow(1, 1).at(field::kInputs).size(0), 0);
}

}  // namespace
}  // namespace birkhoff
