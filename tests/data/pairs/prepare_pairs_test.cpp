// prepare of aligned files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/corpus/manifest.h"
#include "data/corpus/verify.h"
#include "data/text/text_file.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Lines = std::vector<std::string>;

class PreparePairs : public testing::Test {
 protected:
  // Sources and targets with different letters.
  PreparePairs() {
    for (int i = 0; i < 200; ++i) {
      sources_.push_back(fmt::format("source {} of {}", i, i % 7));
      targets_.push_back(fmt::format("ZIEL {} VON {}", i, std::string(i % 5 + 1, 'Q')));
    }
  }

  PrepareOptions options(const std::string& tokenizer = "bytes") const {
    return pair_options(folder_, sources_, targets_, tokenizer);
  }

  Corpus prepared(const PrepareOptions& options) {
    notes_ = prepare_corpus(options).notes;
    Corpus corpus(options.out);
    verify_corpus(corpus);
    return corpus;
  }

  TemporaryFolder folder_;
  Lines sources_, targets_, notes_;
};

TEST_F(PreparePairs, LinesAreDocumentsOfBothStreams) {
  for (const char* tokenizer : {"bytes", "chars", "words", "sentencepiece"}) {
    PrepareOptions options = this->options(tokenizer);
    if (std::string(tokenizer) == "sentencepiece") options.vocab_size = 300;
    options.out = folder_ / tokenizer;
    options.shard_tokens = 300;
    const Corpus corpus = prepared(options);
    EXPECT_EQ(document_texts(corpus, "train", "source"), sources_) << tokenizer;
    EXPECT_EQ(document_texts(corpus, "train", "target"), targets_) << tokenizer;
    EXPECT_GT(corpus.stream("train", "source").shard_size(), 2);
    EXPECT_FALSE(corpus.stream("train", "source").has_tokenizer());
    EXPECT_THAT(notes_, ElementsAre());
  }
}

TEST_F(PreparePairs, CountsAreThoseOfTargets) {
  const Corpus corpus = prepared(options());
  const auto& counts = corpus.split("train").counts();
  std::int64_t bytes = 0;
  for (const std::string& target : targets_) bytes += std::ssize(target);
  EXPECT_EQ(counts.documents(), 200);
  EXPECT_EQ(counts.bytes(), bytes);
  EXPECT_EQ(counts.words(), 4 * 200);
  EXPECT_EQ(counts.sentences(), 200);
}

// The unknown text belongs to the tokens of targets, whatever sources lack.
TEST_F(PreparePairs, UnknownTokensAreThoseOfTargets) {
  PrepareOptions options = this->options("whitespace");
  write_text(folder_ / "valid.source", "unseen words and more unseen\n");
  write_text(folder_ / "valid.target", "ZIEL UNSEEN\n");
  options.valid_paths = {folder_ / "valid.source"};
  options.valid_target_paths = {folder_ / "valid.target"};
  const Corpus corpus = prepared(options);
  const auto& split = corpus.split("valid");
  EXPECT_EQ(split.counts().unknown_tokens(), 1);
  EXPECT_EQ(split.counts().unknown_bytes(), 6);
  EXPECT_EQ(split.unknown_text().rows(), 7);
  EXPECT_THAT(notes_,
              ElementsAre("split valid: 5 of the 6 tokens of the stream source are unknown"));
}

TEST_F(PreparePairs, ASharedVocabularyComesFromBothSides) {
  const Corpus corpus = prepared(options("chars"));
  // "source of 0123456789" and "ZIELVONQ" have 19 and 8 different characters; then the end mark.
  EXPECT_EQ(corpus.vocabulary(), 19 - 1 + 8 + 1);
  EXPECT_EQ(&corpus.tokenizer_entry("source"), &corpus.manifest().tokenizer());
}

TEST_F(PreparePairs, SeparateVocabulariesKnowTheirSide) {
  PrepareOptions options = this->options("words");
  options.source_tokenizer = "chars";
  const Corpus corpus = prepared(options);
  EXPECT_EQ(document_texts(corpus, "train", "source"), sources_);
  EXPECT_EQ(document_texts(corpus, "train", "target"), targets_);
  const auto& source = corpus.tokenizer_entry("source");
  EXPECT_EQ(source.kind(), "chars");
  EXPECT_EQ(source.file(), "source_tokenizer.chars");
  EXPECT_EQ(source.vocabulary(), 19);
  EXPECT_EQ(source.end_of_document(), 18);
  EXPECT_EQ(corpus.tokenizer_entry("target").kind(), "words");
  EXPECT_EQ(corpus.tokenizer("source")->vocabulary(), 19);
  EXPECT_EQ(corpus.tokenizer_file("source"), folder_ / "corpus/source_tokenizer.chars");
  const std::string text = describe_corpus(corpus);
  EXPECT_THAT(text, HasSubstr("tokenizer    words, "));
  EXPECT_THAT(text, HasSubstr("of source    chars, 19 ids, 18 ends a document"));
  // Readers refuse ids that only the other stream has.
  const auto ids = tokens_of(corpus, "train", "target");
  EXPECT_GT(*std::ranges::max_element(ids), 19);
}

TEST_F(PreparePairs, GivenTokenizersOfEachSide) {
  PrepareOptions options = this->options("words");
  options.source_tokenizer = "chars";
  prepared(options);
  PrepareOptions given = options;
  given.out = folder_ / "given";
  given.tokenizer = folder_ / "corpus/tokenizer.words";
  given.source_tokenizer = folder_ / "corpus/source_tokenizer.chars";
  const Corpus corpus = prepared(given);
  EXPECT_EQ(tokens_of(corpus, "train", "source"),
            tokens_of(Corpus(options.out), "train", "source"));
  EXPECT_EQ(corpus.manifest().fingerprint(), Corpus(options.out).manifest().fingerprint());
  // The same for both is one tokenizer.
  given.out = folder_ / "one";
  given.tokenizer = given.source_tokenizer = "bytes";
  EXPECT_FALSE(prepared(given).stream("train", "source").has_tokenizer());
}

TEST_F(PreparePairs, TheFingerprintKnowsTheTokenizersOfStreams) {
  PrepareOptions options = this->options("bytes");
  options.source_tokenizer = "chars";
  configs::CorpusManifest manifest = prepared(options).manifest();
  const std::string before = manifest_fingerprint(manifest);
  EXPECT_EQ(before, manifest.fingerprint());
  for (auto& split : *manifest.mutable_split()) {
    for (auto& stream : *split.mutable_stream()) {
      if (stream.has_tokenizer()) stream.mutable_tokenizer()->set_end_of_document(0);
    }
  }
  EXPECT_NE(manifest_fingerprint(manifest), before);
}

TEST_F(PreparePairs, SplitsHaveTheirOwnFilesOrShares) {
  PrepareOptions options = this->options();
  options.valid_fraction = 0.2;
  write_text(folder_ / "test.source", "a test\nanother\n");
  write_text(folder_ / "test.target", "ein Test\nnoch einer\n");
  options.test_paths = {folder_ / "test.source"};
  options.test_target_paths = {folder_ / "test.target"};
  const Corpus corpus = prepared(options);
  EXPECT_THAT(document_texts(corpus, "test", "source"), ElementsAre("a test", "another"));
  EXPECT_THAT(document_texts(corpus, "test", "target"), ElementsAre("ein Test", "noch einer"));
  // Each pair is in one of the other splits, and its two sides are in the same one.
  std::map<std::string, std::string> pairs;
  for (const char* split : {"train", "valid"}) {
    const Lines sources = document_texts(corpus, split, "source");
    const Lines targets = document_texts(corpus, split, "target");
    ASSERT_EQ(sources.size(), targets.size());
    EXPECT_GT(sources.size(), 20u) << split;
    for (std::size_t i = 0; i < sources.size(); ++i) pairs[sources[i]] = targets[i];
  }
  ASSERT_EQ(pairs.size(), sources_.size());
  for (std::size_t i = 0; i < sources_.size(); ++i) EXPECT_EQ(pairs[sources_[i]], targets_[i]);
}

TEST_F(PreparePairs, SeveralFilesFollowEachOther) {
  PrepareOptions options = this->options();
  write_text(folder_ / "b.source", "last\r\n");
  write_text(folder_ / "b.target", "\xef\xbb\xbfletzte");  // a byte order mark, no line end
  options.paths.push_back(folder_ / "b.source");
  options.target_paths.push_back(folder_ / "b.target");
  const Corpus corpus = prepared(options);
  EXPECT_EQ(document_texts(corpus, "train", "source").back(), "last");
  EXPECT_EQ(document_texts(corpus, "train", "target").back(), "letzte");
  EXPECT_EQ(corpus.split("train").counts().documents(), 201);
}

TEST_F(PreparePairs, BlankPairsAreSkippedAndCounted) {
  sources_[3] = "";
  targets_[3] = " \t";
  sources_[199] = targets_[199] = "";
  const Corpus corpus = prepared(options());
  EXPECT_EQ(corpus.split("train").counts().documents(), 198);
  EXPECT_THAT(notes_, ElementsAre("skipped 2 pairs without text"));
  EXPECT_EQ(document_texts(corpus, "train", "source")[3], sources_[4]);
  EXPECT_EQ(document_texts(corpus, "train", "target")[3], targets_[4]);
}

TEST_F(PreparePairs, ThoseInTwoSplitsAreReported) {
  PrepareOptions options = this->options();
  // The second pair has another target, so it is another pair.
  write_text(folder_ / "test.source", sources_[5] + "\n" + sources_[6] + "\n");
  write_text(folder_ / "test.target", targets_[5] + "\n" + targets_[7] + "\n");
  options.test_paths = {folder_ / "test.source"};
  options.test_target_paths = {folder_ / "test.target"};
  prepared(options);
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_THAT(notes_[0], HasSubstr("1 of the 2 documents of test"));
}

TEST_F(PreparePairs, DefectsNameFileAndLine) {
  const auto refused = [&](const Lines& sources, const Lines& targets, Lines words,
                           const std::string& tokenizer = "chars") {
    const PrepareOptions options = pair_options(folder_, sources, targets, tokenizer);
    expect_error(
        ExitCode::kData, [&] { prepare_corpus(options); }, words);
    EXPECT_FALSE(path_exists(folder_ / "corpus/manifest.json"));
    remove_tree(folder_ / "corpus");
  };
  const std::string source = folder_ / "a.source", target = folder_ / "a.target";
  refused({"a", "b", "c"}, {"x", "y"}, {source + ":3: has no partner", target + " ends after 2"});
  refused({"a"}, {"x", "y", "z"}, {target + ":2: has no partner", source + " ends after 1 line"});
  refused({"a", "", "c"}, {"x", "y", "z"}, {source + ":2: the line is blank", target + ":2"});
  refused({"a", "b"}, {"x", " \t"}, {target + ":2: the line is blank", source + ":2"});
  refused({"a", std::string("b\0", 2)}, {"x", "y"}, {source + ":2: byte 1", "NUL", "the pair"});
  refused({"a", "b"}, {"x", "y\xff"}, {target + ":2: byte 1", "not UTF-8", "the pair"});
  refused({"a", std::string((1 << 20) + 1, 'b')}, {"x", "y"}, {source + ":2: the line is longer"});
  refused({"a", "b"}, {"x", std::string((1 << 20) + 1, 'y')}, {target + ":2", "longer"});
}

TEST_F(PreparePairs, OptionsThatDoNotFitAreRefused) {
  const auto refused = [&](const std::function<void(PrepareOptions&)>& spoil, Lines words) {
    PrepareOptions options = this->options();
    spoil(options);
    expect_error(
        ExitCode::kUsage, [&] { prepare_corpus(options); }, words);
    EXPECT_FALSE(path_exists(folder_ / "corpus/manifest.json"));
  };
  const std::string target = folder_ / "a.target";
  refused([](auto& o) { o.target_paths.push_back(o.target_paths[0]); },
          {"--target: 2 files of targets for 1 file of sources (--train)"});
  refused([](auto& o) { o.valid_paths = {o.paths[0]}; }, {"--valid-target: 0 files", "--valid"});
  refused([&](auto& o) { o.test_target_paths = {target}; }, {"--test-target: 1 file", "--test"});
  refused([](auto& o) { o.target_paths = o.paths; }, {"a.source: is given twice"});
  refused([&](auto& o) { o.target_paths = {folder_ / "none"}; }, {"none", "No such file"});
  refused(
      [&](auto& o) {
        std::filesystem::create_directories(folder_ / "many");
        o.target_paths = {folder_ / "many"};
      },
      {"many: is no regular file", "two files"});
  refused([](auto& o) { o.paths = {"-"}; }, {"-: pairs are read from files"});
  refused([](auto& o) { o.format = {.kind = TextFormat::kLines}; }, {"--target", "--lines"});
  refused([](auto& o) { o.table = TableColumns{"1", "2"}; }, {"--target", "--text-column"});
  refused([](auto& o) { o.source_tokenizer = "letters"; }, {"--source-tokenizer letters: neither"});
  refused([](auto& o) { o.vocab_size = 500; }, {"--vocab-size 500"});
  refused(
      [](auto& o) {
        o.source_tokenizer = "words";
        o.vocab_size = 2;
      },
      {"--vocab-size 2: from 3", "words"});
  refused(
      [](auto& o) {
        o.target_paths.clear();
        o.source_tokenizer = "words";
      },
      {"--source-tokenizer words", "--target"});
  refused([](auto& o) { o.like = TokenizerSource{.kind = "bytes", .vocabulary = 256}; },
          {"--like", "no end mark", "sources and targets"});
}

TEST_F(PreparePairs, TheSameCommandDoesNothingAndAnotherIsRefused) {
  PrepareOptions options = this->options("words");
  options.source_tokenizer = "chars";
  prepared(options);
  const auto content = content_of(options.out);
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  // Touched files have the same text.
  std::filesystem::last_write_time(folder_ / "a.source",
                                   std::filesystem::file_time_type::clock::now());
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  PrepareOptions other = options;
  other.source_tokenizer = "bytes";
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(other); }, {"other options", "pairs"});
  other = options;
  std::swap(other.paths, other.target_paths);
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(other); }, {"made from other text"});
  sources_[0] += " more";
  write_text(folder_ / "a.source", joined_lines(sources_));
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {"made from other text"});
  EXPECT_EQ(content_of(options.out), content);
}

// The text of a file, compressed or not.
std::string whole_text(const std::string& path) {
  TextFile file(File::open_for_read(path), path);
  std::string text, part(1 << 20, '\0');
  while (const std::size_t got = file.read_some(part.data(), part.size()))
    text.append(part, 0, got);
  return text;
}

// Elliott et al. 2016, "Multi30K: Multilingual English-German Image Descriptions".
TEST(PrepareMulti30k, ComesBackFromItsTokens) {
  TemporaryFolder folder;
  PrepareOptions options = prepare_options(folder / "corpus", {}, "sentencepiece");
  const auto add = [](const std::string& name, std::vector<std::string>& sources,
                      std::vector<std::string>& targets) {
    const auto source = real_data("multi30k." + name + ".en.gz");
    const auto target = real_data("multi30k." + name + ".de.gz");
    if (!source || !target) return false;
    sources.push_back(*source);
    targets.push_back(*target);
    return true;
  };
  if (!add("train", options.paths, options.target_paths) ||
      !add("val", options.valid_paths, options.valid_target_paths) ||
      !add("test_2016_flickr", options.test_paths, options.test_target_paths)) {
    GTEST_SKIP() << "BIRKHOFF_DATA holds no multi30k.*.gz";
  }
  options.vocab_size = 1000;  // SentencePiece takes long to learn 8,000 pieces
  const PrepareResult result = prepare_corpus(options);
  EXPECT_THAT(result.notes, ElementsAre());
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  EXPECT_EQ(corpus.vocabulary(), 1000);
  EXPECT_EQ(corpus.split("train").counts().documents(), 29'000);
  EXPECT_EQ(corpus.split("valid").counts().documents(), 1'014);
  EXPECT_EQ(corpus.split("test").counts().documents(), 1'000);
  const auto expect_text = [&](const char* split, const char* stream, const std::string& file) {
    EXPECT_TRUE(joined_lines(document_texts(corpus, split, stream)) == whole_text(file)) << file;
  };
  expect_text("valid", "source", options.valid_paths[0]);
  expect_text("valid", "target", options.valid_target_paths[0]);
  expect_text("test", "source", options.test_paths[0]);
  expect_text("test", "target", options.test_target_paths[0]);
}

}  // namespace
}  // namespace birkhoff
