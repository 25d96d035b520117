#include "data/loader/labelled_documents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "data/loader/document_rows.h"
#include "data/loader/loader.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

// Bytes of 40 rows in small shards; row i has the text of i + 1 letters and the label i modulo 3.
class LabelledDocumentsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string table;
    for (int i = 0; i < kRows; ++i) {
      table += text_of(i) + "\t" + std::to_string(i % 3) + "\n";
    }
    write_text(folder_ / "table.tsv", table);
    PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "table.tsv"});
    options.valid_fraction = 0;
    options.table = TableColumns{.text = "1", .label = "2"};
    options.shard_tokens = 50;
    prepare_corpus(options);
    corpus_.emplace(folder_ / "corpus");
    ASSERT_GT(corpus_->stream("train", "tokens").shard_size(), 3);
  }

  static std::string text_of(std::int64_t row) {
    return std::string(static_cast<std::size_t>(row) + 1, static_cast<char>('a' + row % 26));
  }

  // Expects that row `i` of the batch is the document `row`, cut to kLength tokens.
  static void expect_document(const Batch& batch, std::int64_t i, std::int64_t row) {
    const std::int64_t tokens = row + 2;  // with the end mark
    const std::int64_t length = std::min(tokens, kLength);
    ASSERT_EQ(batch.at(field::kLengths)[i].item<std::int64_t>(), length);
    EXPECT_EQ(batch.at(field::kLabels)[i].item<std::int64_t>(), row % 3);
    for (std::int64_t t = 0; t < kLength; ++t) {
      const std::int64_t expected = t >= length       ? 0
                                    : t == tokens - 1 ? kEnd
                                                      : text_of(row)[static_cast<std::size_t>(t)];
      ASSERT_EQ(batch.at(field::kInputs)[i][t].item<std::int64_t>(), expected)
          << "row " << row << ", token " << t;
    }
  }

  static constexpr int kRows = 40;
  static constexpr std::int64_t kLength = 24, kEnd = 256;
  TemporaryFolder folder_;
  std::optional<Corpus> corpus_;
};

TEST_F(LabelledDocumentsTest, DocumentsAreCutOrPaddedAndKeepTheirLabels) {
  const auto source = labelled_documents(*corpus_, {.sequence_length = kLength});
  ASSERT_EQ(source->num_samples(), kRows);
  const Batch batch = read_samples(*source, 0, kRows);
  for (std::int64_t i = 0; i < kRows; ++i) {
    expect_document(batch, i, i);
    EXPECT_EQ(batch.sample_ids_B[i].item<std::int64_t>(), i);
  }
  // Any other order.
  const Batch later = read_samples(*source, 31, 33);
  expect_document(later, 0, 31);
  expect_document(later, 1, 32);
}

TEST_F(LabelledDocumentsTest, EpochsTakeEachDocumentOnceOnAnyNumberOfRanks) {
  constexpr std::int64_t kGlobal = 8;
  std::vector<int> seen(kRows, 0);
  for (int rank = 0; rank < 3; ++rank) {
    TrainLoader loader(labelled_documents(*corpus_, {.sequence_length = kLength}),
                       {.batches = {.global_batch = kGlobal, .seed = 3, .rank = rank, .size = 3}},
                       0);
    for (int step = 0; step < kRows / kGlobal; ++step) {
      const Batch batch = loader.next();
      for (std::int64_t i = 0; i < batch.size(); ++i) {
        // A document's letters and length tell its number, up to those that are cut.
        const auto length = batch.at(field::kLengths)[i].item<std::int64_t>();
        if (length < kLength) {
          ++seen[static_cast<std::size_t>(length - 2)];
          expect_document(batch, i, length - 2);
        } else {
          ++seen[static_cast<std::size_t>(kLength - 1)];
        }
      }
    }
  }
  for (std::int64_t row = 0; row < kLength - 2; ++row)
    EXPECT_EQ(seen[static_cast<std::size_t>(row)], 1) << row;
  EXPECT_EQ(seen[kLength - 1], kRows - (kLength - 2));
}

TEST_F(LabelledDocumentsTest, CutDocumentsAreCounted) {
  // Row i has i + 2 tokens.
  EXPECT_EQ(count_cut_documents(*corpus_, {.sequence_length = kLength}), kRows + 1 - kLength);
  EXPECT_EQ(count_cut_documents(*corpus_, {.sequence_length = kRows + 1}), 0);
  EXPECT_EQ(count_cut_documents(*corpus_, {.sequence_length = 1}), kRows);
  const auto lengths = document_lengths(*corpus_, "train", "tokens");
  ASSERT_EQ(lengths.size(), static_cast<std::size_t>(kRows));
  for (std::int64_t row = 0; row < kRows; ++row) EXPECT_EQ(lengths.at(row + 2), 1) << row;
}

// Token by token, from the end of the longer text.
TEST(JoinedLengths, AreThoseOfLongestFirst) {
  for (std::int64_t first = 1; first <= 12; ++first) {
    for (std::int64_t second = 1; second <= 12; ++second) {
      for (std::int64_t length = 2; length <= 26; ++length) {
        std::int64_t a = first, b = second;
        while (a + b > length) --(a > b ? a : b);
        const PairLengths lengths = joined_lengths({first, second}, length);
        EXPECT_EQ(lengths.first, a) << first << " and " << second << " in " << length;
        EXPECT_EQ(lengths.second, b) << first << " and " << second << " in " << length;
      }
    }
  }
}

// Row i has i % 12 + 1 letters of one kind and (7 i) % 9 + 1 of another.
class LabelledPairsTest : public testing::Test {
 protected:
  LabelledPairsTest() {
    std::string table;
    for (int i = 0; i < kRows; ++i)
      table += first_of(i) + "\t" + std::to_string(i % 2) + "\t" + second_of(i) + "\n";
    write_text(folder_ / "table.tsv", table);
    PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "table.tsv"});
    options.valid_fraction = 0;
    options.table = TableColumns{.text = "1", .label = "2", .second = "3"};
    options.shard_tokens = 50;
    prepare_corpus(options);
    corpus_.emplace(folder_ / "corpus");
  }

  static std::string first_of(int i) {
    return std::string(static_cast<std::size_t>(i % 12 + 1), static_cast<char>('a' + i % 13));
  }
  static std::string second_of(int i) {
    return std::string(static_cast<std::size_t>(7 * i % 9 + 1), static_cast<char>('n' + i % 13));
  }
  static std::vector<std::int64_t> tokens_of(const std::string& text) {
    std::vector<std::int64_t> tokens(text.begin(), text.end());
    tokens.push_back(kEnd);
    return tokens;
  }
  static std::vector<std::int64_t> values_of(const at::Tensor& tokens) {
    const auto* begin = tokens.const_data_ptr<std::int64_t>();
    return {begin, begin + tokens.numel()};
  }

  static constexpr int kRows = 50;
  static constexpr std::int64_t kLength = 14, kEnd = 256;
  TemporaryFolder folder_;
  std::optional<Corpus> corpus_;
};

TEST_F(LabelledPairsTest, AJoinedPairIsOneSequenceWithBothEndMarks) {
  const auto source = labelled_documents(
      *corpus_, {.sequence_length = kLength, .second_stream = "second", .joined = true});
  const Batch batch = read_samples(*source, 0, kRows);
  std::int64_t num_cut = 0;
  for (int i = 0; i < kRows; ++i) {
    std::vector<std::int64_t> first = tokens_of(first_of(i)), second = tokens_of(second_of(i));
    num_cut += std::ssize(first) + std::ssize(second) > kLength;
    // Letters before the end mark go.
    while (std::ssize(first) + std::ssize(second) > kLength) {
      auto& longer = first.size() > second.size() ? first : second;
      longer.erase(longer.begin());
    }
    first.insert(first.end(), second.begin(), second.end());
    EXPECT_EQ(batch.at(field::kLengths)[i].item<std::int64_t>(), std::ssize(first)) << i;
    EXPECT_EQ(source->length(i).longest(), std::ssize(first)) << i;
    EXPECT_EQ(batch.at(field::kLabels)[i].item<std::int64_t>(), i % 2);
    first.resize(kLength);
    EXPECT_EQ(values_of(batch.at(field::kInputs)[i]), first) << i;
  }
  EXPECT_GT(num_cut, 5);
  EXPECT_LT(num_cut, kRows);
  EXPECT_EQ(count_cut_documents(
                *corpus_, {.sequence_length = kLength, .second_stream = "second", .joined = true}),
            num_cut);
}

TEST_F(LabelledPairsTest, TwoTowersReadTwoSequences) {
  constexpr std::int64_t kShort = 8;
  const DocumentOptions options{.sequence_length = kShort, .second_stream = "second", .trim = true};
  const auto source = labelled_documents(*corpus_, options);
  std::int64_t num_cut = 0;
  for (const auto& [begin, end] : {std::pair(0, kRows), {0, 2}, {12, 13}}) {
    const Batch batch = read_samples(*source, begin, end);
    std::int64_t width = 0;
    for (int i = begin; i < end; ++i) {
      std::int64_t longest = 0;
      for (int k = 0; k < 2; ++k) {
        std::vector<std::int64_t> tokens = tokens_of(k == 0 ? first_of(i) : second_of(i));
        longest = std::max(longest, std::ssize(tokens));
        tokens.resize(static_cast<std::size_t>(std::min(std::ssize(tokens), kShort)));
        width = std::max(width, std::ssize(tokens));
        EXPECT_EQ(batch.at(field::kLengths)[i - begin][k].item<std::int64_t>(), std::ssize(tokens));
        tokens.resize(static_cast<std::size_t>(batch.at(field::kInputs).size(2)));
        EXPECT_EQ(values_of(batch.at(field::kInputs)[i - begin][k].contiguous()), tokens) << i;
      }
      if (end == kRows) num_cut += longest > kShort;
    }
    EXPECT_EQ(batch.at(field::kInputs).sizes(), (std::vector<std::int64_t>{end - begin, 2, width}));
  }
  EXPECT_EQ(count_cut_documents(*corpus_, options), num_cut);
}

// With batch_tokens: each pair once an epoch, on any number of ranks.
TEST_F(LabelledPairsTest, BatchesOfSimilarLengthTakeEachPairOnce) {
  for (const bool joined : {false, true}) {
    for (const int ranks : {1, 3}) {
      std::multiset<std::int64_t> seen;
      for (int rank = 0; rank < ranks; ++rank) {
        TrainLoader loader(
            labelled_documents(*corpus_, {.sequence_length = kLength,
                                          .second_stream = "second",
                                          .joined = joined,
                                          .trim = true}),
            {.batches =
                 {.global_batch = 4, .batch_tokens = 64, .seed = 3, .rank = rank, .size = ranks}},
            0);
        for (std::int64_t consumed = 0; consumed < kRows;) {
          const Batch batch = loader.next();
          consumed += batch.global_size;
          EXPECT_LE(batch.at(field::kInputs).size(-1) * batch.global_size, 64);
          for (std::int64_t i = 0; i < batch.size(); ++i)
            seen.insert(batch.sample_ids_B[i].item<std::int64_t>());
        }
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(kRows));
      EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(),
                static_cast<std::size_t>(kRows));
    }
  }
}

TEST_F(LabelledPairsTest, ErrorsNameWhatDoesNotFit) {
  expect_error(ExitCode::kData,
               [&] {
                 check_labelled_documents(*corpus_,
                                          {.sequence_length = kLength, .second_stream = "third"});
               },
               {"'third'", "tokens, second"});
  write_text(folder_ / "a.txt", "a b\nc d\n");
  write_text(folder_ / "b.txt", "e f\ng h\n");
  PrepareOptions options = prepare_options(folder_ / "aligned", {folder_ / "a.txt"}, "words");
  options.target_paths = {folder_ / "b.txt"};
  options.source_tokenizer = "chars";
  options.valid_fraction = 0;
  prepare_corpus(options);
  expect_error(ExitCode::kData,
               [&] {
                 check_labelled_documents(
                     Corpus(folder_ / "aligned"),
                     {.stream = "source", .sequence_length = kLength, .second_stream = "target"});
               },
               {"'source' and 'target'", "different tokenizers"});
}

TEST_F(LabelledDocumentsTest, ErrorsNameWhatIsMissing) {
  expect_error(
      ExitCode::kData,
      [&] { labelled_documents(*corpus_, {.split = "valid", .sequence_length = kLength}); },
      {"'valid'"});
  expect_error(
      ExitCode::kData,
      [&] { check_labelled_documents(*corpus_, {.label = "mood", .sequence_length = kLength}); },
      {"'mood'", "label"});
  expect_error(ExitCode::kData,
               [&] {
                 check_labelled_documents(*corpus_,
                                          {.stream = "letters", .sequence_length = kLength});
               },
               {"'letters'", "tokens"});
}

}  // namespace
}  // namespace birkhoff
