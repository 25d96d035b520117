// Legend: B batch, S tokens of a source, T tokens of a target.
#include "data/loader/token_pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "data/corpus/manifest.h"
#include "data/loader/loader.h"
#include "tests/data/helpers.h"
#include "tests/data/loader/loader_fixture.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

// Pairs in small shards. Words are letters; sources and targets have a tokenizer each, so their
// end marks differ.
class TokenPairsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::string> sources, targets;
    for (int i = 0; i < kPairs; ++i) {
      sources.push_back(std::string(static_cast<std::size_t>(source_tokens(i) - 1),
                                    static_cast<char>('a' + i % 3)));
      targets.push_back(std::string(static_cast<std::size_t>(target_tokens(i) - 1),
                                    static_cast<char>('m' + i % 7)));
    }
    PrepareOptions options = pair_options(folder_, sources, targets, "chars");
    options.source_tokenizer = "chars";
    options.shard_tokens = 40;
    prepare_corpus(options);
    corpus_.emplace(folder_ / "corpus");
    ASSERT_GT(corpus_->stream("train", "source").shard_size(), 3);
    ASSERT_EQ(corpus_->tokenizer_entry("source").end_of_document(), kSourceEnd);
    ASSERT_EQ(corpus_->tokenizer_entry("target").end_of_document(), kTargetEnd);
  }

  // With end marks. No two pairs have the same two numbers.
  static std::int64_t source_tokens(std::int64_t i) { return 2 + i % 11; }
  static std::int64_t target_tokens(std::int64_t i) { return 2 + (i * 5) % 13; }

  static Numbers source_of(std::int64_t i) {
    Numbers ids(static_cast<std::size_t>(source_tokens(i)), i % 3);
    ids.back() = kSourceEnd;
    return ids;
  }
  static Numbers target_of(std::int64_t i) {
    Numbers ids(static_cast<std::size_t>(target_tokens(i)), i % 7);
    ids.back() = kTargetEnd;
    return ids;
  }
  static Numbers fitted(Numbers ids, std::int64_t length, std::int64_t width,
                        std::int64_t padding) {
    ids.resize(static_cast<std::size_t>(std::min<std::int64_t>(std::ssize(ids), length)));
    ids.resize(static_cast<std::size_t>(width), padding);
    return ids;
  }

  static PairOptions options(std::int64_t source_length = 8, std::int64_t target_length = 10) {
    return {.source_length = source_length, .target_length = target_length};
  }

  // Expects that row `b` of the batch is pair `i`.
  static void expect_pair(const Batch& batch, std::int64_t b, std::int64_t i,
                          const PairOptions& options) {
    const std::int64_t width = batch.at(field::kInputs).size(1);
    const std::int64_t target_width = batch.at(field::kTargets).size(1);
    EXPECT_EQ(row<std::int64_t>(batch, field::kInputs, b),
              fitted(source_of(i), options.source_length, width, 0));
    EXPECT_EQ(batch.at(field::kLengths)[b].item<std::int64_t>(),
              std::min(source_tokens(i), options.source_length));
    const Numbers targets = fitted(target_of(i), options.target_length, target_width, 0);
    EXPECT_EQ(row<std::int64_t>(batch, field::kTargets, b), targets);
    const std::int64_t length = std::min(target_tokens(i), options.target_length);
    const auto mask = row<std::uint8_t>(batch, field::kMask, b);
    const Numbers previous = row<std::int64_t>(batch, field::kPrevious, b);
    for (std::int64_t t = 0; t < target_width; ++t) {
      const auto at = static_cast<std::size_t>(t);
      EXPECT_EQ(mask[at], t < length) << t;
      EXPECT_EQ(previous[at], t == 0 || t >= length ? kTargetEnd : targets[at - 1]) << t;
    }
  }

  // The width of a batch whose longest row has that many tokens.
  static std::int64_t width_of(std::int64_t longest, std::int64_t length, std::int64_t multiple) {
    const std::int64_t used = std::min(longest, length);
    return std::min((used + multiple - 1) / multiple * multiple, length);
  }

  static constexpr int kPairs = 60;
  static constexpr std::int64_t kSourceEnd = 3, kTargetEnd = 7;
  TemporaryFolder folder_;
  std::optional<Corpus> corpus_;
};

TEST_F(TokenPairsTest, PairsAreCutOrPadded) {
  const auto source = token_pairs(*corpus_, options());
  ASSERT_EQ(source->num_samples(), kPairs);
  const Batch batch = read_samples(*source, 0, kPairs);
  EXPECT_EQ(batch.at(field::kInputs).size(1), 8);
  EXPECT_EQ(batch.at(field::kTargets).size(1), 10);
  for (std::int64_t i = 0; i < kPairs; ++i) {
    expect_pair(batch, i, i, options());
    EXPECT_EQ(batch.sample_ids_B[i].item<std::int64_t>(), i);
  }
}

TEST_F(TokenPairsTest, BatchesAreAsWideAsTheirLongestRows) {
  for (const std::int64_t multiple : {1, 3, 4, 100}) {
    PairOptions chosen = options();
    chosen.width_multiple = multiple;
    const auto source = token_pairs(*corpus_, chosen);
    bool was_narrow = false;
    for (std::int64_t begin = 0; begin + 2 <= kPairs; begin += 2) {
      const Batch batch = read_samples(*source, begin, begin + 2);
      const std::int64_t longest_source = std::max(source_tokens(begin), source_tokens(begin + 1));
      const std::int64_t longest_target = std::max(target_tokens(begin), target_tokens(begin + 1));
      EXPECT_EQ(batch.at(field::kInputs).size(1), width_of(longest_source, 8, multiple));
      const std::int64_t target_width = width_of(longest_target, 10, multiple);
      for (const auto name : {field::kPrevious, field::kTargets, field::kMask})
        EXPECT_EQ(batch.at(name).size(1), target_width) << name;
      was_narrow |= target_width < 10;
      expect_pair(batch, 0, begin, chosen);
      expect_pair(batch, 1, begin + 1, chosen);
    }
    EXPECT_EQ(was_narrow, multiple < 10);
  }
}

TEST_F(TokenPairsTest, EpochsTakeEachPairOnceOnAnyNumberOfRanks) {
  constexpr std::int64_t kGlobal = 12;
  std::map<std::int64_t, std::int64_t> first;  // the pair of each sample id, on one rank
  for (int size = 1; size <= 4; ++size) {
    std::map<std::int64_t, std::int64_t> pairs;
    std::vector<int> seen(kPairs, 0);
    for (int rank = 0; rank < size; ++rank) {
      LoaderOptions loading{.global_batch = kGlobal, .seed = 5, .rank = rank, .size = size};
      loading.max_readers = 2;
      TrainLoader loader(token_pairs(*corpus_, options(50, 50)), loading, 0);
      for (int step = 0; step < kPairs / kGlobal; ++step) {
        const Batch batch = loader.next();
        EXPECT_LE(batch.at(field::kInputs).size(1), batch.size() > 0 ? 12 : 50) << "not trimmed";
        const at::Tensor lengths_B = batch.at(field::kLengths);
        const at::Tensor targets_B = batch.at(field::kMask).sum(1);
        for (std::int64_t b = 0; b < batch.size(); ++b) {
          std::int64_t pair = 0;
          while (source_tokens(pair) != lengths_B[b].item<std::int64_t>() ||
                 target_tokens(pair) != targets_B[b].item<std::int64_t>()) {
            ASSERT_LT(++pair, kPairs);
          }
          expect_pair(batch, b, pair, options(50, 50));
          ++seen[static_cast<std::size_t>(pair)];
          pairs[batch.sample_ids_B[b].item<std::int64_t>()] = pair;
        }
      }
    }
    EXPECT_EQ(seen, std::vector<int>(kPairs, 1));
    if (size == 1) first = pairs;
    EXPECT_EQ(pairs, first) << size;
  }
}

// A narrowed batch keeps the memory that it shares.
TEST_F(TokenPairsTest, TheLoaderKeepsBatchesThatAreInUse) {
  TrainLoader loader(token_pairs(*corpus_, options()),
                     {.global_batch = 2, .seed = 1, .prefetch = 1}, 0);
  std::vector<Batch> held;
  std::vector<at::Tensor> copies;
  for (int i = 0; i < 20; ++i) {
    held.push_back(loader.next());
    copies.push_back(held.back().at(field::kInputs).clone());
  }
  for (std::size_t i = 0; i < held.size(); ++i)
    EXPECT_TRUE(held[i].at(field::kInputs).equal(copies[i])) << i;
}

TEST_F(TokenPairsTest, ARankWithoutRowsGetsAnEmptyBatch) {
  std::vector<std::int64_t> sizes;
  for (int rank = 0; rank < 3; ++rank) {
    TrainLoader loader(token_pairs(*corpus_, options()),
                       {.global_batch = 2, .seed = 1, .rank = rank, .size = 3}, 0);
    sizes.push_back(loader.next().size());
  }
  std::ranges::sort(sizes);
  EXPECT_EQ(sizes, (Numbers{0, 1, 1}));
}

TEST_F(TokenPairsTest, CutPairsAreCounted) {
  for (const auto& [source, target] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {1, 1}, {5, 100}, {100, 5}, {7, 9}, {12, 14}, {11, 14}}) {
    std::int64_t expected = 0;
    for (std::int64_t i = 0; i < kPairs; ++i)
      expected += source_tokens(i) > source || target_tokens(i) > target;
    EXPECT_EQ(count_cut_pairs(*corpus_, options(source, target)), expected);
  }
}

TEST_F(TokenPairsTest, ErrorsNameWhatIsMissing) {
  const auto refused = [&](PairOptions bad, std::vector<std::string> words) {
    bad.source_length = bad.target_length = 8;
    expect_error(
        ExitCode::kData, [&] { check_token_pairs(*corpus_, bad); }, words);
    expect_error(
        ExitCode::kData, [&] { token_pairs(*corpus_, bad); }, words);
  };
  refused({.split = "valid"}, {"'valid'", "train"});
  refused({.source = "english"}, {"'english'", "target, source"});
  refused({.target = "german"}, {"'german'", "target, source"});
}

// `prepare` makes no such corpus.
TEST_F(TokenPairsTest, TargetsWithoutAnEndMarkAreRefused) {
  configs::CorpusManifest manifest = corpus_->manifest();
  manifest.mutable_tokenizer()->clear_end_of_document();
  write_text(folder_ / "corpus/manifest.json", manifest_json(manifest));
  const Corpus corpus(folder_ / "corpus");
  expect_error(ExitCode::kData, [&] { check_token_pairs(corpus, options()); },
               {"'target'", "no end mark", "--target"});
}

}  // namespace
}  // namespace birkhoff
