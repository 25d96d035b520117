// Batches of a number of tokens: what they hold, and that they depend on nothing but the position.
#include "data/loader/batch_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"
#include "data/loader/loader.h"
#include "data/loader/token_pairs.h"
#include "data/prepare/prepare.h"
#include "tests/data/helpers.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kLongest = 48, kTokens = 768;

// Pairs whose lengths are random, as those of sentences: the target is about as long as its source.
class Pairs final : public SampleSource {
 public:
  explicit Pairs(std::int64_t size) : size_(size) {}

  std::int64_t num_samples() const override { return size_; }
  bool lengths_vary() const override { return true; }
  SampleLength length(std::int64_t sample) override {
    const auto words = philox(/*key=*/7, 0, static_cast<std::uint64_t>(sample));
    const std::int64_t source = 1 + (words[0] % 24 + words[1] % 24);  // most near 24
    return {source, std::clamp<std::int64_t>(source + words[2] % 9 - 4, 1, kLongest)};
  }
  Batch make_batch(std::int64_t rows) const override {
    Batch batch;
    batch.sample_ids_B = at::empty({rows}, at::kLong);
    return batch;
  }
  void fill(Batch&, const std::vector<Row>&) override {}

 private:
  const std::int64_t size_;
};

BatchPlanOptions options(int rank = 0, int size = 1) {
  return {.global_batch = 0, .batch_tokens = kTokens, .seed = 5, .rank = rank, .size = size};
}

std::vector<std::int64_t> samples_of(const PlannedBatch& batch) {
  std::vector<std::int64_t> samples;
  for (const auto& row : batch.rows) samples.push_back(row.sample);
  return samples;
}

// The batches of positions [begin, end).
std::vector<PlannedBatch> batches(BatchPlan& plan, std::int64_t begin, std::int64_t end) {
  std::vector<PlannedBatch> all;
  for (std::int64_t at = begin; at < end; at += all.back().size) all.push_back(plan.at(at));
  return all;
}

// Epochs of less than a pool, of one pool and one sample, and of several pools.
class TokenBatches : public testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Epochs, TokenBatches,
                         testing::Values(1, 7, 1000, kPoolSamples + 1, 2 * kPoolSamples + 977));

TEST_P(TokenBatches, HoldEachSampleOnceAnEpochOnAnyNumberOfRanks) {
  const std::int64_t n = GetParam();
  Pairs source(n);
  const auto whole = make_batch_plan(source, options());
  std::vector<std::unique_ptr<BatchPlan>> of_rank;
  for (int rank = 0; rank < 3; ++rank) of_rank.push_back(make_batch_plan(source, options(rank, 3)));
  std::vector<std::vector<std::int64_t>> epochs(2);
  for (const std::int64_t epoch : {0, 1}) {
    auto& seen = epochs[static_cast<std::size_t>(epoch)];
    for (std::int64_t at = epoch * n; at < (epoch + 1) * n;) {
      const PlannedBatch batch = whole->at(at);
      std::vector<std::int64_t> joined;
      for (const auto& plan : of_rank) {
        const PlannedBatch part = plan->at(at);
        EXPECT_EQ(part.size, batch.size);
        for (const auto& row : part.rows) joined.push_back(row.sample);
      }
      ASSERT_EQ(joined, samples_of(batch)) << "position " << at;
      for (const auto& row : batch.rows) {
        ASSERT_EQ(row.epoch, epoch);
        ASSERT_EQ(row.id, at++);  // ids are positions
        seen.push_back(row.sample);
      }
    }
    EXPECT_EQ(std::set(seen.begin(), seen.end()).size(), static_cast<std::size_t>(n));
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(n));
  }
  if (n > 7) {
    EXPECT_NE(epochs[0], epochs[1]);
  }
}

TEST_P(TokenBatches, HoldAsManySamplesAsFit) {
  const std::int64_t n = GetParam();
  Pairs source(n);
  const auto plan = make_batch_plan(source, options());
  double tokens = 0, padded = 0;
  for (const PlannedBatch& batch : batches(*plan, 0, n)) {
    SampleLength longest;
    for (const auto& row : batch.rows) {
      const SampleLength length = source.length(row.sample);
      longest = {std::max(longest.source, length.source), std::max(longest.target, length.target)};
      tokens += static_cast<double>(length.source + length.target);
    }
    EXPECT_LE(batch.size * longest.longest(), kTokens);
    EXPECT_GE(batch.size, std::min(n, kTokens / kLongest / 2));
    padded += static_cast<double>(batch.size * (longest.source + longest.target));
  }
  if (n >= kPoolSamples / 2) {
    EXPECT_GT(tokens / padded, 0.92);
  }
}

TEST_P(TokenBatches, ComeInAnOrderOfTheirOwn) {
  const std::int64_t n = GetParam();
  Pairs source(n);
  const auto plan = make_batch_plan(source, options());
  std::vector<std::int64_t> lengths;
  for (const PlannedBatch& batch : batches(*plan, 0, n)) {
    lengths.push_back(source.length(batch.rows.back().sample).longest());
  }
  if (lengths.size() > 8) {
    EXPECT_FALSE(std::ranges::is_sorted(lengths));
  }
}

TEST_P(TokenBatches, BeginAgainAtAnyOfThem) {
  const std::int64_t n = GetParam();
  Pairs source(n);
  const auto plan = make_batch_plan(source, options());
  const std::vector<PlannedBatch> all = batches(*plan, 0, 2 * n);
  std::int64_t at = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % (1 + all.size() / 5) == 0) {
      const auto resumed = make_batch_plan(source, options());
      EXPECT_EQ(samples_of(resumed->at(at)), samples_of(all[i])) << at;
    }
    at += all[i].size;
  }
  // Going back and forth between two pools changes nothing either.
  EXPECT_EQ(samples_of(plan->at(0)), samples_of(all[0]));
  if (all[0].size > 1) {
    try {
      plan->at(1);
      ADD_FAILURE() << "a batch begins inside another";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_THAT(error.what(), testing::HasSubstr("position 1 of the data: no batch of "
                                                   "train.batch_tokens = 768 begins there"));
    }
  }
}

TEST(BatchPlan, DependsOnTheSeed) {
  Pairs source(1000);
  BatchPlanOptions other = options();
  other.seed = 6;
  EXPECT_NE(samples_of(make_batch_plan(source, options())->at(0)),
            samples_of(make_batch_plan(source, other)->at(0)));
}

// An epoch of Multi30k in batches of 4,096 tokens.
TEST(BatchPlan, PadsLittleOfMulti30k) {
  const auto source = real_data("multi30k.train.en.gz"), target = real_data("multi30k.train.de.gz");
  if (!source || !target) GTEST_SKIP() << "BIRKHOFF_DATA holds no multi30k.train.*.gz";
  const TemporaryFolder folder;
  PrepareOptions prepare;
  prepare.out = folder / "corpus";
  prepare.tokenizer = "words";
  prepare.paths = {*source};
  prepare.target_paths = {*target};
  prepare.valid_fraction = 0;
  prepare_corpus(prepare);
  auto pairs = token_pairs(Corpus(prepare.out), {.source_length = 64, .target_length = 64});
  const std::int64_t size = pairs->num_samples();
  EXPECT_EQ(size, 29000);
  TrainLoader loader(std::move(pairs), {.batches = {.batch_tokens = 4096, .seed = 3}}, 0);
  std::int64_t read = 0, tokens = 0, padded = 0;
  while (read < size) {
    const Batch batch = loader.next();
    read += batch.size();
    for (const auto name : {field::kInputs, field::kTargets}) {
      EXPECT_LE(batch.at(name).numel(), 4096);
      padded += batch.at(name).numel();
    }
    tokens += batch.at(field::kLengths).sum().item<std::int64_t>() +
              batch.at(field::kMask).sum().item<std::int64_t>();
  }
  EXPECT_EQ(read, size);
  EXPECT_LT(static_cast<double>(padded - tokens) / static_cast<double>(padded), 0.08);
}

}  // namespace
}  // namespace birkhoff
