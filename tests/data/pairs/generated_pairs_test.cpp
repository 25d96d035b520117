#include "data/generate/generated_pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "data/corpus/verify.h"
#include "data/loader/token_pairs.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

using Ids = std::vector<std::int32_t>;

GeneratedPairs pairs_of(const std::string& task) {
  GeneratedPairs pairs;
  pairs.task = task;
  pairs.symbols = 20;
  pairs.train_length = 10;
  pairs.length = 20;
  pairs.samples = 300;
  pairs.test_samples = 50;
  return pairs;
}

// Pearson's statistic of counts that should be equal.
double chi_square(const std::vector<std::int64_t>& counts) {
  double sum = 0, statistic = 0;
  for (const std::int64_t count : counts) sum += static_cast<double>(count);
  const double expected = sum / static_cast<double>(counts.size());
  for (const std::int64_t count : counts)
    statistic += std::pow(static_cast<double>(count) - expected, 2) / expected;
  return statistic;
}

// With k degrees of freedom the statistic has mean k and variance 2 k: 5 standard deviations.
double limit(std::int64_t values) {
  const auto k = static_cast<double>(values - 1);
  return k + 5 * std::sqrt(2 * k);
}

TEST(GeneratedPairs, LengthsAndSymbolsAreUniform) {
  const GeneratedPairs pairs = pairs_of("sort");
  for (const int split : {0, 1, 2}) {
    const std::int64_t longest = split == 0 ? pairs.train_length : pairs.length;
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(longest)), symbols(20), firsts(20);
    for (std::int64_t i = 0; i < 20'000; ++i) {
      const Ids ids = pairs.source(split, i);
      ASSERT_EQ(ids.back(), GeneratedPairs::kEndId);
      ++lengths.at(ids.size() - 2);
      for (auto id = ids.begin(); id + 1 != ids.end(); ++id)
        ++symbols.at(static_cast<std::size_t>(*id - GeneratedPairs::kFirstSymbolId));
      ++firsts.at(static_cast<std::size_t>(ids.front() - GeneratedPairs::kFirstSymbolId));
    }
    EXPECT_LT(chi_square(lengths), limit(longest));
    EXPECT_LT(chi_square(symbols), limit(20));
    EXPECT_LT(chi_square(firsts), limit(20));
  }
}

// Symbols are drawn with replacement, independently of their neighbors.
TEST(GeneratedPairs, SymbolsRepeat) {
  const GeneratedPairs pairs = pairs_of("sort");
  std::int64_t neighbors = 0, equal = 0;
  for (std::int64_t i = 0; i < 20'000; ++i) {
    const Ids ids = pairs.source(0, i);
    for (std::size_t k = 1; k + 1 < ids.size(); ++k) {
      ++neighbors;
      equal += ids[k] == ids[k - 1];
    }
  }
  const double expected = static_cast<double>(neighbors) / 20;
  EXPECT_NEAR(static_cast<double>(equal), expected, 5 * std::sqrt(expected));
}

TEST(GeneratedPairs, SeedsAndSplitsDiffer) {
  GeneratedPairs pairs = pairs_of("copy"), other = pairs;
  pairs.train_length = pairs.length = other.train_length = other.length = 20;
  other.seed = 2;
  std::int64_t same = 0;
  for (std::int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(pairs.source(0, i), pairs.source(0, i));
    same += pairs.source(0, i) == other.source(0, i);
    same += pairs.source(0, i) == pairs.source(1, i);
    same += pairs.source(1, i) == pairs.source(2, i);
  }
  EXPECT_LT(same, 10);  // short sequences may be equal by chance
}

TEST(GeneratedPairs, TargetsFollowTheTask) {
  const Ids source = {7, 3, 9, 3, GeneratedPairs::kEndId};
  EXPECT_EQ(pairs_of("copy").target(source), source);
  EXPECT_EQ(pairs_of("reverse").target(source), (Ids{3, 9, 3, 7, 1}));
  EXPECT_EQ(pairs_of("sort").target(source), (Ids{3, 3, 7, 9, 1}));
}

TEST(GeneratedPairs, TheCorpusHoldsThem) {
  TemporaryFolder folder;
  for (const std::string& task : GeneratedPairs::tasks()) {
    const GeneratedPairs pairs = pairs_of(task);
    ASSERT_TRUE(generate_pairs(folder / task, pairs));
    const Corpus corpus(folder / task);
    verify_corpus(corpus);
    EXPECT_EQ(corpus.vocabulary(), pairs.symbols + 2);
    for (const SplitIndex split : kSplits) {
      Ids sources, targets;
      const std::int64_t samples = split == kTrain ? pairs.samples : pairs.test_samples;
      for (std::int64_t i = 0; i < samples; ++i) {
        const Ids source = pairs.source(split, i), target = pairs.target(source);
        sources.insert(sources.end(), source.begin(), source.end());
        targets.insert(targets.end(), target.begin(), target.end());
      }
      EXPECT_EQ(tokens_of(corpus, kSplitNames[split], "source"), sources);
      EXPECT_EQ(tokens_of(corpus, kSplitNames[split], "target"), targets);
      const auto& counts = corpus.split(kSplitNames[split]).counts();
      EXPECT_EQ(counts.documents(), samples);
      EXPECT_EQ(counts.words(), std::ssize(targets) - samples);
    }
    EXPECT_EQ(token_pairs(corpus, {.source_length = 21, .target_length = 21})->num_samples(),
              pairs.samples);
    EXPECT_FALSE(generate_pairs(folder / task, pairs));
    GeneratedPairs other = pairs;
    other.seed = 2;
    expect_error(ExitCode::kUsage, [&] { generate_pairs(folder / task, other); },
                 {"another corpus", "seed 1"});
  }
}

// A text of symbols, prepared like the corpus, has its ids.
TEST(GeneratedPairs, TheirTextIsNumbers) {
  TemporaryFolder folder;
  generate_pairs(folder / "sort", pairs_of("sort"));
  const Corpus corpus(folder / "sort");
  EXPECT_EQ(corpus.tokenizer()->encode("0 19 3"), (Ids{2, 21, 5}));
  EXPECT_EQ(corpus.tokenizer()->decode({2, 21, 5}), "0 19 3");
  PrepareOptions options = pair_options(folder, {"3 1 2"}, {"1 2 3"});
  options.like = TokenizerSource{.kind = "whitespace",
                                 .file = corpus.tokenizer_file().string(),
                                 .vocabulary = 22,
                                 .end_of_document = 1};
  prepare_corpus(options);
  EXPECT_EQ(tokens_of(Corpus(folder / "corpus"), "train", "target"), (Ids{3, 4, 5, 1}));
}

// The same on every machine.
TEST(GeneratedPairs, TheFingerprintIsKnown) {
  TemporaryFolder folder;
  generate_pairs(folder / "sort", pairs_of("sort"));
  EXPECT_EQ(Corpus(folder / "sort").manifest().fingerprint(), "7a743aff850b07ce17ede69aced43091");
}

}  // namespace
}  // namespace birkhoff
