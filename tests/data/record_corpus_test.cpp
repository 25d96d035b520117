// Corpora without text: records of images, points and labels, no streams and no tokenizer.
#include <gtest/gtest.h>

#include "cluster/base/files/checksum.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "data/loader/token_windows.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

TEST(RecordCorpus, NeedsNoTokenizer) {
  TemporaryFolder folder;
  const std::string pixels = write_image_corpus(folder / "corpus", 100, 30);
  const Corpus corpus(folder / "corpus");
  EXPECT_FALSE(corpus.has_tokenizer());
  EXPECT_EQ(corpus.vocabulary(), 0);
  EXPECT_TRUE(corpus.tokenizer_file().empty());
  verify_corpus(corpus);
  ShardSequence images(corpus, corpus.record("train", "image"));
  std::string read(pixels.size(), '\0');
  images.read_bytes(0, 100, read.data());
  EXPECT_EQ(read, pixels);
  std::vector<std::int64_t> labels(100);
  LabelReader(corpus, "train", "label").read(0, 100, labels.data());
  EXPECT_EQ(std::vector<std::int64_t>(labels.begin(), labels.begin() + 4),
            (std::vector<std::int64_t>{1, 0, 0, 1}));
  EXPECT_EQ(describe_corpus(corpus),
            fmt::format("corpus       {}\nfingerprint  {}\ntokenizer    none: records without "
                        "text\nsplit train  100 rows\n"
                        "  record image: 100 u8 x [4, 5, 3] in 4 shards\n"
                        "  record points: 100 f32 x [7, 3] in 4 shards\n"
                        "  label label: 2 classes (cat, dog), 100 u16 in 4 shards\n",
                        folder / "corpus", corpus.manifest().fingerprint()));
}

TEST(RecordCorpus, IsRefusedWhereTextIsNeeded) {
  TemporaryFolder folder;
  write_image_corpus(folder / "corpus", 10, 30);
  const Corpus corpus(folder / "corpus");
  expect_error(ExitCode::kData, [&] { corpus.tokenizer(); },
               {folder / "corpus", "no tokenizer", "records"});
  expect_error(ExitCode::kData, [&] { num_training_windows(corpus, {.sequence_length = 4}); },
               {folder / "corpus", "no stream 'tokens'", "it has: none"});
}

// How images were made equal in size is part of what inspect shows.
TEST(RecordCorpus, SaysHowImagesWereResized) {
  TemporaryFolder folder;
  write_image_corpus(folder / "corpus", 10, 30);
  edit_manifest(folder / "corpus", [](CorpusManifest& manifest) {
    manifest.mutable_split(0)->mutable_record(0)->set_resized("32 x 32, triangle filter");
  });
  EXPECT_NE(describe_corpus(Corpus(folder / "corpus"))
                .find("in 1 shard, resized: 32 x 32, triangle filter\n"),
            std::string::npos);
}

// A stream's ids mean nothing without a tokenizer, nor does the text of unknown tokens.
TEST(RecordCorpus, AStreamNeedsATokenizer) {
  TemporaryFolder folder;
  write_image_corpus(folder / "corpus", 10, 30);
  const CorpusManifest good = Corpus(folder / "corpus").manifest();
  const auto expect_refused = [&](const std::function<void(CorpusManifest::Split&)>& edit) {
    CorpusManifest manifest = good;
    edit(*manifest.mutable_split(0));
    expect_error(ExitCode::kData, [&] { parse_corpus_manifest(manifest_json(manifest), "m"); },
                 {"m: tokenizer: kind is ''"});
  };
  expect_refused([](CorpusManifest::Split& split) { split.add_stream()->set_name("tokens"); });
  expect_refused([](CorpusManifest::Split& split) { split.mutable_unknown_text(); });
  CorpusManifest manifest = good;
  manifest.mutable_tokenizer()->set_kind("letters");
  expect_error(ExitCode::kData, [&] { parse_corpus_manifest(manifest_json(manifest), "m"); },
               {"m: tokenizer: kind is 'letters'"});
}

}  // namespace
}  // namespace birkhoff
