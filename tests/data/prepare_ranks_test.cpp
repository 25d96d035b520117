// prepare of text on ranks: the bytes and the notes are those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "data/corpus/verify.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using Notes = std::vector<std::string>;

Notes prepare_on(int num_ranks, PrepareOptions options, const std::string& out) {
  options.out = out;
  if (num_ranks == 1) return prepare_corpus(options).notes;
  Notes notes;
  run_ranks(num_ranks, [&](ProcessGroup& ranks) {
    const PrepareResult result = prepare_corpus(options, {}, &ranks);
    if (ranks.rank() == 0) notes = result.notes;
  });
  return notes;
}

class PrepareOnThreads : public testing::TestWithParam<const char*> {
 protected:
  // About 4 MB, of which the largest file is most, so that documents are larger than a bundle, and
  // smaller.
  PrepareOnThreads() {
    const std::string kind = GetParam();
    write_text(folder_ / "in/large", sentences(50'000, 1));
    for (int i = 0; i < 40; ++i)
      write_text(folder_ / fmt::format("in/small/{:02}", i), sentences(50, i));
    options_ = prepare_options("", {folder_ / "in"}, "words");
    options_.test_fraction = 0.05;
    options_.shard_tokens = 100'000;
    options_.sample_bytes = 50'000;
    if (kind == "bytes" || kind == "chars" || kind == "whitespace") options_.tokenizer = kind;
    if (kind == "words") options_.vocab_size = 8;  // some words are unknown
    if (kind == "lines") options_.format = {.kind = TextFormat::kLines};
    if (kind == "separator") options_.format = {.kind = TextFormat::kSeparator, .name = "blocks"};
    if (kind == "sentencepiece") {
      options_.tokenizer = kind;
      options_.vocab_size = 300;
    }
    if (kind == "jsonl") {
      std::string lines;
      for (int i = 0; i < 20'000; ++i)
        lines += fmt::format("{{\"id\": {}, \"text\": \"{} is a text\"}}\n", i, i % 997);
      write_text(folder_ / "in/large", lines);
      std::filesystem::remove_all(folder_ / "in/small");
      options_.format = {.kind = TextFormat::kJsonLines, .name = "text"};
      options_.shard_tokens = 20'000;
    }
    if (kind == "table") {
      std::string rows = "label\ttext\n";
      for (int i = 0; i < 100'000; ++i)
        rows += fmt::format("{}\trow {} of many\n", i % 7, i % 9973);
      write_text(folder_ / "in/large", rows);
      std::filesystem::remove_all(folder_ / "in/small");
      options_.table = TableColumns{"text", "label"};
    }
    if (kind == "pairs" || kind == "separate_pairs") {
      std::string sources, targets;
      for (int i = 0; i < 60'000; ++i) {
        sources += fmt::format("source {} of many\n", i % 9973);
        targets += fmt::format("many, and {} is the {}th\n", i % 9973, i % 31);
      }
      write_text(folder_ / "sources", sources);
      write_text(folder_ / "targets", targets);
      options_.paths = {folder_ / "sources"};
      options_.target_paths = {folder_ / "targets"};
      options_.vocab_size = 5000;  // some words are unknown
      if (kind == "separate_pairs") options_.source_tokenizer = "chars";
    }
    if (kind == "one_document") {
      options_.tokenizer = "chars";
      options_.paths = {folder_ / "in/large"};
    }
  }

  TemporaryFolder folder_;
  PrepareOptions options_;
};

INSTANTIATE_TEST_SUITE_P(All, PrepareOnThreads,
                         testing::Values("bytes", "chars", "words", "whitespace", "sentencepiece",
                                         "lines", "separator", "jsonl", "table", "one_document",
                                         "pairs", "separate_pairs"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST_P(PrepareOnThreads, MakesTheSameBytes) {
  const Notes notes = prepare_on(1, options_, folder_ / "one");
  verify_corpus(Corpus(folder_ / "one"));
  const auto expected = content_of(folder_ / "one");
  EXPECT_TRUE(
      expected.contains("train-tokens-00001.h5") ||
      (expected.contains("train-source-00001.h5") && expected.contains("train-target-00001.h5")))
      << "several shards";
  for (const int num_ranks : {2, 3, 5}) {
    const std::string out = folder_ / fmt::format("ranks{}", num_ranks);
    EXPECT_EQ(prepare_on(num_ranks, options_, out), notes);
    const auto content = content_of(out);
    EXPECT_TRUE(content == expected) << num_ranks;
    run_ranks(num_ranks, [&](ProcessGroup& ranks) {
      PrepareOptions again = options_;
      again.out = out;
      const PrepareResult result = prepare_corpus(again, {}, &ranks);
      EXPECT_EQ(result.already_prepared, ranks.rank() == 0);
    });
  }
  if (std::string(GetParam()) == "jsonl") {
    EXPECT_THAT(notes, testing::Contains(HasSubstr("have the same text as documents of train")));
  }
}

TEST(PrepareRanks, TheFirstLossOfTextIsNamedWhicheverRankFindsIt) {
  TemporaryFolder folder;
  // A model of ours turns this sign into a space. Only the third and the fourth bundle have it.
  std::string text = sentences(80'000, 1);
  ASSERT_GT(text.size(), std::size_t{4} << 20);
  text.insert(text.find('\n', 7 << 19) + 1, "\u2581\u2581\n");
  text.insert(text.find('\n', 5 << 19) + 1, "\u2581\n");
  write_text(folder / "text", text);
  PrepareOptions options = prepare_options("", {folder / "text"}, "sentencepiece");
  options.vocab_size = 300;
  options.sample_bytes = 50'000;
  const Notes notes = prepare_on(1, options, folder / "one");
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], StartsWith("warning: split train: the tokens do not restore parts"));
  for (const int num_ranks : {2, 3}) {
    const std::string out = folder / fmt::format("ranks{}", num_ranks);
    EXPECT_EQ(prepare_on(num_ranks, options, out), notes);
    EXPECT_TRUE(content_of(out) == content_of(folder / "one"));
  }
}

// Readers take two ends at one place for damage.
TEST(PrepareRanks, ADocumentWithoutTokensIsNamed) {
  TemporaryFolder folder;
  write_text(folder / "one", "a few words of one document\n");
  PrepareOptions single = prepare_options("", {folder / "one"}, "whitespace");
  single.valid_fraction = 0;
  prepare_on(1, single, folder / "single");
  const Corpus corpus(folder / "single");
  const auto& tokenizer = corpus.manifest().tokenizer();
  ASSERT_FALSE(tokenizer.has_end_of_document());
  PrepareOptions several = prepare_options("", {folder / "in"}, "bytes");
  several.valid_fraction = 0;
  several.like = TokenizerSource{tokenizer.kind(), folder / "single/tokenizer.whitespace",
                                 tokenizer.vocabulary()};
  write_text(folder / "in/a", "few words\n");
  write_text(folder / "in/b", "   ");
  write_text(folder / "in/c", "of words\n");
  for (const int num_ranks : {1, 2}) {
    expect_error(ExitCode::kData, [&] { prepare_on(num_ranks, several, folder / "several"); },
                 {folder / "in/b", "nothing but white space"});
  }
  std::filesystem::remove(folder / "in/b");
  prepare_on(1, several, folder / "several");
  verify_corpus(Corpus(folder / "several"));
}

TEST(PrepareRanks, RefusesWhatRanksCannotShare) {
  TemporaryFolder folder;
  write_text(folder / "a", sentences(60'000, 1) + "\u0416\n");
  write_text(folder / "b", sentences(10, 1));
  const PrepareOptions options = prepare_options("", {folder / "b"}, "chars");
  prepare_on(1, options, folder / "b_corpus");
  // The last bundle has a character that the vocabulary lacks.
  PrepareOptions lacking = prepare_options("", {folder / "a"}, folder / "b_corpus/tokenizer.chars");
  lacking.valid_fraction = 0;
  for (const int num_ranks : {1, 2, 3}) {
    expect_error(ExitCode::kData, [&] { prepare_on(num_ranks, lacking, folder / "lacking"); },
                 {folder / "a", "from byte", "U+0416"});
  }
  // Ranks on machines with other files.
  const auto on_two = [&](const std::vector<std::string>& paths) {
    run_ranks(2, [&](ProcessGroup& ranks) {
      PrepareOptions mine = prepare_options(
          folder / "other", {paths[static_cast<std::size_t>(ranks.rank())]}, "bytes");
      prepare_corpus(mine, {}, &ranks);
    });
  };
  expect_error(ExitCode::kData,
               [&] {
                 on_two({folder / "a", folder / "b"});
               },
               {"rank 1 sees other text than rank 0", "a file system that all see"});
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const std::string& pipe : {std::string("-"), folder / "pipe"}) {
    expect_error(ExitCode::kUsage,
                 [&] {
                   on_two({pipe, pipe});
                 },
                 {pipe, "ranks cannot read a pipe"});
  }
}

}  // namespace
}  // namespace birkhoff
