#include "data/loader/labelled_documents.h"

#include <gtest/gtest.h>

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
                       {.global_batch = kGlobal, .seed = 3, .rank = rank, .size = 3}, 0);
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
