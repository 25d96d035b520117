// `birkhoff prepare` of tables and of pairs, from the command line to the corpus.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "data/corpus/corpus.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/verify.h"
#include "launcher/app.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

class PrepareTables : public testing::Test {
 protected:
  PrepareTables() {
    std::filesystem::current_path(folder_.path());
    write_bytes("train.tsv", "sentence\tlabel\na fine film\t1\na bad film\t0\nfine\t1\n");
    write_bytes("dev.tsv", "label\tsentence\r\n0\tbad\r\n");
    write_bytes("test.tsv", "sentence\tlabel\nso fine\t1");
  }
  ~PrepareTables() override { std::filesystem::current_path("/"); }

  // Runs a command that must succeed; returns what it printed.
  static std::string run(const std::string& line) {
    std::ostringstream out, err;
    EXPECT_EQ(run_app(split_line(line), out, err), 0) << err.str();
    return out.str() + err.str();
  }

  static std::vector<std::int64_t> labels(const std::string& folder, const std::string& split) {
    const Corpus corpus(folder);
    LabelReader reader(corpus, split, "label");
    std::vector<std::int64_t> values(static_cast<std::size_t>(reader.rows()));
    reader.read(0, reader.rows(), values.data());
    return values;
  }

  TemporaryFolder folder_{"birkhoff_prepare_tables"};
};

constexpr char kCommand[] =
    "prepare --out corpus --text-column sentence --label-column label --train train.tsv "
    "--valid dev.tsv --test test.tsv --tokenizer words";

TEST_F(PrepareTables, WithOfficialSplits) {
  const std::string shown = run(kCommand);
  EXPECT_THAT(shown, HasSubstr("split train  3 documents, 3 sentences, 7 words"));
  EXPECT_THAT(shown, HasSubstr("  label label: 2 classes (0, 1), 3 u16 in 1 shard\n"));
  EXPECT_EQ(labels("corpus", "train"), (std::vector<std::int64_t>{1, 0, 1}));
  EXPECT_EQ(labels("corpus", "valid"), std::vector<std::int64_t>{0});
  EXPECT_EQ(labels("corpus", "test"), std::vector<std::int64_t>{1});
  EXPECT_THAT(run(kCommand), HasSubstr("corpus is already prepared from this input"));
  const std::string inspected = run("inspect corpus");
  EXPECT_THAT(inspected, HasSubstr("2 classes (0, 1), 1 u16 in 1 shard\n"));
  EXPECT_THAT(inspected,
              HasSubstr("texts of train: half have at most 4 tokens, 99 % at most 4, the "
                        "longest 4; training cuts those above data.sequence_length\n"));
  EXPECT_THAT(inspected, HasSubstr("texts of valid: half have at most 2 tokens"));
  EXPECT_THAT(inspected, HasSubstr("  unknown tokens: 0 (0 %), 0 bytes\n"));
  EXPECT_THAT(run("verify corpus"), HasSubstr("verified"));
}

TEST_F(PrepareTables, WithColumnsByNumber) {
  run("prepare --out corpus --text-column 1 --label-column 2 --header --valid 0 train.tsv");
  EXPECT_EQ(labels("corpus", "train"), (std::vector<std::int64_t>{1, 0, 1}));
  const std::string shown =
      run("prepare --out words --text-column 1 --label-column 2 --valid 0 train.tsv");
  EXPECT_THAT(shown, HasSubstr("3 classes (0, 1, label), 4 u16"));  // the header is a row
}

TEST_F(PrepareTables, LikeACorpusWithItsClasses) {
  write_bytes("train.tsv", "sentence\tlabel\na\tup\nb\tdown\nc\tsame\nd\tup\n");
  run("prepare --out corpus --text-column sentence --label-column label --valid 0 train.tsv");
  write_bytes("more.tsv", "sentence\tlabel\na\tup\nb\tsame\n");
  const std::string columns = " --text-column sentence --label-column label --valid 0 more.tsv";
  run("prepare --out alone" + columns);
  EXPECT_EQ(labels("alone", "train"), (std::vector<std::int64_t>{1, 0}));
  run("prepare --out alike --like corpus" + columns);
  EXPECT_EQ(labels("alike", "train"), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(Corpus("alike").record("train", "label").class_name_size(), 3);
  // Text has no labels to name.
  write_bytes("text", "some text");
  run("prepare --out text-corpus --like corpus --valid 0 text");
  EXPECT_EQ(Corpus("text-corpus").split("train").record_size(), 0);
}

class PreparePairs : public PrepareTables {
 protected:
  PreparePairs() {
    write_bytes("train.en", "a dog\na cat\na dog runs\n");
    write_bytes("train.de", "ein Hund\neine Katze\nein Hund rennt\n");
    write_bytes("val.en", "a cat runs\n");
    write_bytes("val.de", "eine Katze rennt\n");
  }
};

constexpr char kFiles[] =
    " --train train.en --target train.de --valid val.en --valid-target val.de";

TEST_F(PreparePairs, WithOfficialSplits) {
  const std::string shown = run(std::string("prepare --out pairs --tokenizer words") + kFiles);
  EXPECT_THAT(shown, HasSubstr("split train  3 documents, 3 sentences, 7 words"));
  EXPECT_THAT(shown, HasSubstr("  stream target: 10 u8 in 1 shard ("));
  EXPECT_THAT(shown, HasSubstr("  stream source: 10 u8 in 1 shard\n"));
  EXPECT_THAT(run("verify pairs"), HasSubstr("verified"));
  const std::string inspected = run("inspect pairs");
  EXPECT_THAT(inspected, HasSubstr("sources of train: half have at most 3 tokens, 99 % at most 4, "
                                   "the longest 4; training cuts those above "
                                   "data.sequence_length\n"));
  EXPECT_THAT(inspected, HasSubstr("targets of valid: half have at most 4 tokens"));
  EXPECT_THAT(inspected, HasSubstr("above task.translation.target_length\n"));
  EXPECT_THAT(run(std::string("prepare --out pairs --tokenizer words") + kFiles),
              HasSubstr("already prepared"));
}

TEST_F(PreparePairs, LikeACorpusWithItsTokenizers) {
  run(std::string("prepare --out pairs --tokenizer words --source-tokenizer chars") + kFiles);
  const std::string shown = run("prepare --out more --like pairs --valid 0 val.en --target val.de");
  EXPECT_THAT(shown, HasSubstr("  of source    chars, "));
  const Corpus pairs("pairs"), more("more");
  for (const char* stream : {"source", "target"}) {
    EXPECT_EQ(more.tokenizer_entry(stream).SerializeAsString(),
              pairs.tokenizer_entry(stream).SerializeAsString());
  }
}

TEST_F(PreparePairs, Generated) {
  const std::string command =
      "prepare --out sort --generate sort --symbols 16 --train-length 8 --length 16 --samples 50 "
      "--test-samples 9 --seed 3";
  const std::string shown = run(command);
  EXPECT_THAT(shown, HasSubstr("tokenizer    whitespace, 18 ids, 1 ends a document"));
  EXPECT_THAT(shown, HasSubstr("split train  50 documents"));
  EXPECT_THAT(shown, HasSubstr("split test   9 documents"));
  EXPECT_THAT(run("verify sort"), HasSubstr("verified"));
  EXPECT_THAT(run(command), HasSubstr("sort already holds these pairs"));
}

}  // namespace
}  // namespace birkhoff
