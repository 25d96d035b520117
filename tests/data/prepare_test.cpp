#include "data/prepare/prepare.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "data/corpus/corpus.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/text_counts.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

TEST(Prepare, ASingleFileIsCutAtFractions) {
  TemporaryFolder folder;
  const std::string text = sentences(100, 1);
  write_text(folder / "text", text);
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"});
  options.test_fraction = 0.05;
  EXPECT_FALSE(prepare_corpus(options).already_prepared);
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.vocabulary(), 256);
  EXPECT_FALSE(corpus.manifest().tokenizer().has_end_of_document());
  const std::string train = text_of(corpus, "train"), valid = text_of(corpus, "valid"),
                    test = text_of(corpus, "test");
  EXPECT_EQ(train + valid + test, text);
  const double bytes = static_cast<double>(text.size());
  EXPECT_NEAR(static_cast<double>(train.size()), 0.85 * bytes, 3);
  EXPECT_NEAR(static_cast<double>(valid.size()), 0.10 * bytes, 4);
  EXPECT_NEAR(static_cast<double>(test.size()), 0.05 * bytes, 4);
  verify_corpus(corpus);
}

TEST(Prepare, CutsBetweenCharacters) {
  TemporaryFolder folder;
  for (int length = 20; length < 28; ++length) {
    std::string text(static_cast<std::size_t>(length - 20), 'x');
    while (text.size() < 60) text += "\U0001f600";
    write_text(folder / "text", text);
    const std::string out = folder / fmt::format("corpus{}", length);
    PrepareOptions options = prepare_options(out, {folder / "text"}, "chars");
    options.valid_fraction = 0.3;
    prepare_corpus(options);
    const Corpus corpus(out);
    EXPECT_EQ(text_of(corpus, "train") + text_of(corpus, "valid"), text);
  }
}

TEST(Prepare, CountsAreExact) {
  TemporaryFolder folder;
  write_text(folder / "in/a",
             "One  two\nthree \u00e9\n\n \t\nlast line");  // 3 lines with words, 6 words
  write_text(folder / "in/b", "x");
  write_text(folder / "in/deep/c", "\n\n");
  write_text(folder / "in/empty", "");
  ASSERT_EQ(symlink("a", (folder / "in/link").c_str()), 0);
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.valid_fraction = 0;
  const PrepareResult result = prepare_corpus(options);
  EXPECT_EQ(result.empty_files, 1);
  EXPECT_EQ(result.not_regular, 1);
  const auto counts = Corpus(folder / "corpus").split("train").counts();
  EXPECT_EQ(counts.documents(), 3);
  EXPECT_EQ(counts.sentences(), 4);
  EXPECT_EQ(counts.words(), 7);
  EXPECT_EQ(counts.bytes(), 31 + 1 + 2);
  EXPECT_EQ(counts.characters(), 30 + 1 + 2);
}

TEST(TextCounter, DoesNotDependOnTheParts) {
  const std::string text = sentences(20, 3);
  TextCounter whole, parts;
  whole.add(text);
  whole.end_document();
  for (const char c : text) parts.add(std::string_view(&c, 1));
  parts.end_document();
  EXPECT_EQ(whole.counts().SerializeAsString(), parts.counts().SerializeAsString());
  EXPECT_EQ(whole.counts().sentences(), 20);
  EXPECT_EQ(whole.counts().words(), 20 * 9);
}

TEST(Prepare, EveryTokenizerRoundTripsFromFileFolderAndChunks) {
  for (const std::string tokenizer : {"bytes", "chars", "words", "sentencepiece"}) {
    TemporaryFolder folder;
    const std::string a = sentences(60, 1), b = sentences(60, 2);
    write_text(folder / "in/a", a);
    write_text(folder / "in/b", b);
    PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"}, tokenizer);
    options.valid_fraction = 0;
    if (tokenizer == "sentencepiece") options.vocab_size = 330;
    prepare_corpus(options);
    const Corpus corpus(folder / "corpus");
    EXPECT_EQ(text_of(corpus, "train"), a + b) << tokenizer;
    ASSERT_TRUE(corpus.manifest().tokenizer().has_end_of_document());
    const auto mark = static_cast<std::int32_t>(corpus.manifest().tokenizer().end_of_document());
    const auto ids = tokens_of(corpus, "train");
    EXPECT_EQ(std::count(ids.begin(), ids.end(), mark), 2);
    EXPECT_EQ(ids.back(), mark);
    verify_corpus(corpus);
    // Small chunks and shards hold the same tokens.
    options.out = folder / "chunked";
    options.chunk_bytes = 300;
    options.shard_tokens = 1000;
    prepare_corpus(options);
    EXPECT_EQ(tokens_of(Corpus(folder / "chunked"), "train"), ids) << tokenizer;
  }
}

// The pieces of our models neither hold a newline nor continue into a space, where parts are cut.
TEST(Prepare, OurSubwordModelsGiveTheSameIdsInAnyParts) {
  TemporaryFolder folder;
  std::string text = sentences(300, 1);
  for (int i = 0; i < 40; ++i) {  // indented code, blank lines, tabs, and lines longer than a part
    text += "    int  value;\n\n\tlist\t= a,b;  \r\n" + std::string(5, '\n');
    std::string line = sentences(60, i);
    std::replace(line.begin(), line.end(), '\n', ' ');
    text += line + (i % 2 ? "\n" : "");
  }
  write_text(folder / "text", text);
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"}, "sentencepiece");
  options.vocab_size = 400;
  prepare_corpus(options);
  const auto tokenizer = Corpus(folder / "corpus").tokenizer();
  const std::vector<std::int32_t> whole = tokenizer->encode(text);
  EXPECT_EQ(tokenizer->decode(whole), text);
  const auto bytes = static_cast<std::int64_t>(text.size());
  for (const std::int64_t part_bytes : {40, 100, 333, 1000, 16 << 10, 64 << 10}) {
    std::vector<std::int32_t> ids;
    int parts = 0;
    const Document document{folder / "text", "text", "text", bytes};
    DocumentReader reader(document);
    for_each_chunk(reader, 0, bytes, part_bytes, [&](std::string_view part, std::int64_t) {
      ++parts;
      const auto more = tokenizer->encode(part);
      ids.insert(ids.end(), more.begin(), more.end());
    });
    EXPECT_GT(parts, 1);
    EXPECT_EQ(ids, whole) << part_bytes;
  }
}

TEST(Prepare, TakesAModelThatWasTrainedBefore) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(200, 1));
  PrepareOptions options = prepare_options(folder / "first", {folder / "text"}, "sentencepiece");
  options.vocab_size = 330;
  prepare_corpus(options);
  options = prepare_options(folder / "second", {folder / "text"}, folder / "first/tokenizer.model");
  prepare_corpus(options);
  const Corpus first(folder / "first"), second(folder / "second");
  EXPECT_EQ(second.manifest().tokenizer().kind(), "sentencepiece");
  EXPECT_EQ(tokens_of(first, "train"), tokens_of(second, "train"));
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  expect_error(
      ExitCode::kData,
      [&] {
        prepare_corpus(prepare_options(folder / "third", {folder / "text"}, folder / "text"));
      },
      {"text", "SentencePiece"});
  write_text(folder / "first/tokenizer.model", "damaged");
  expect_error(ExitCode::kData, [&] { first.tokenizer(); }, {"tokenizer.model", "hash"});
}

TEST(Prepare, CharactersAreThoseOfTheTrainingSplit) {
  TemporaryFolder folder;
  write_text(folder / "text", "abcabcabcabcabcabcz");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"}, "chars");
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.vocabulary(), 4);  // a, b, c, unknown
  EXPECT_EQ(text_of(corpus, "valid"), "c\ufffd");
}

TEST(Prepare, WordsKeepTheMostFrequent) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(100, 1));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"}, "words");
  options.vocab_size = 7;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.vocabulary(), 7);
  const auto ids = tokens_of(corpus, "train");
  EXPECT_GT(std::count(ids.begin(), ids.end(), 0), 0);
  verify_corpus(corpus);
}

// Other times are not another text; other bytes or names are.
TEST(Prepare, ATouchedInputIsTheSameText) {
  TemporaryFolder folder;
  const std::string text = sentences(300, 2);
  const auto touch = [](const std::string& path) {
    const timespec times[] = {{1000, 0}, {1000, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  for (const std::string& input : {folder / "one/text", folder / "two/b/text"}) {
    SCOPED_TRACE(input);
    const std::string given = folder / (input == folder / "one/text" ? "one" : "two");
    write_text(input, text);
    if (given == folder / "two") write_text(folder / "two/a", sentences(50, 3));
    PrepareOptions options = prepare_options(given + "-corpus", {given}, "words");
    options.vocab_size = 40;
    options.chunk_bytes = 1000;  // the text is cut into many parts
    prepare_corpus(options);
    const auto content = content_of(options.out);
    touch(input);
    EXPECT_TRUE(prepare_corpus(options).already_prepared);
    EXPECT_EQ(content_of(options.out), content);

    std::string other = text;
    other.back() ^= 1;
    write_text(input, other);
    expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {options.out, "other text;"});
    remove_file(input);
    write_text(input + "2", text);
    expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {options.out, "other text;"});
  }
}

// Earlier versions recorded no hash of the text.
TEST(Prepare, ATouchedInputOfAnOldCorpusIsRefused) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(100, 1));
  const PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"});
  prepare_corpus(options);
  configs::CorpusManifest manifest = Corpus(options.out).manifest();
  manifest.mutable_source()->clear_text_hash();
  write_text(folder / "corpus/manifest.json", manifest_json(manifest));
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  write_text(folder / "text", sentences(100, 1));
  const timespec times[] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, (folder / "text").c_str(), times, 0), 0);
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); },
               {options.out, "or its files were touched since", "earlier version"});
}

TEST(Prepare, ReadsStreams) {
  TemporaryFolder folder;
  const std::string text = sentences(500, 4);
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const PrepareOptions options = prepare_options(folder / "corpus", {pipe}, "chars");
  const auto feed = [&](const std::string& content) {
    return std::thread([&pipe, content] { std::ofstream(pipe) << content; });
  };
  std::thread first = feed(text);
  prepare_corpus(options);
  first.join();
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(text_of(corpus, "train") + text_of(corpus, "valid"), text);
  for (const std::string& name : list_directory(folder / "corpus")) EXPECT_NE(name[0], '.') << name;
  std::thread again = feed(text);
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  again.join();
  // Nothing of another stream is written to a finished corpus, not even temporarily.
  const auto finished = content_of(folder / "corpus");
  std::thread other = feed(text + "more");
  int reports = 0;
  const auto look = [&](const PrepareProgress&) {
    ++reports;
    EXPECT_EQ(content_of(folder / "corpus"), finished);
  };
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options, look); },
               {folder / "corpus", "other text"});
  other.join();
  EXPECT_GT(reports, 0);
  EXPECT_EQ(content_of(folder / "corpus"), finished);
}

// Folds case and lines, as SentencePiece models with other settings than ours do.
TEST(LostText, IsNamedAndCounted) {
  EXPECT_EQ(lost_text("A  Line\n \nof text\n", "a  line  of text"),
            "newlines 3 -> 0, spaces 4 -> 5, capitals 2 -> 0");
  EXPECT_EQ(lost_text("e\u0301", "\u00e9"), "other characters");
}

TEST(LostText, IsSaidByPrepare) {
  TemporaryFolder folder;
  const auto notes = [&](const std::string& text, const std::string& out) {
    write_text(folder / "text", text);
    PrepareOptions options = prepare_options(folder / out, {folder / "text"}, "sentencepiece");
    options.vocab_size = 300;
    return prepare_corpus(options).notes;
  };
  std::string text;
  for (int i = 0; i < 200; ++i) text += "many blocks of text number " + std::to_string(i) + "\n";
  EXPECT_THAT(notes(text, "kept"), testing::IsEmpty());
  // SentencePiece's sign for a space comes back as one.
  EXPECT_THAT(notes("\u2581" + text, "lost"),
              testing::ElementsAre(testing::AllOf(
                  testing::HasSubstr("warning: split train: the tokens do not restore parts"),
                  testing::HasSubstr(folder / "text" + ", spaces 9"))));
}

}  // namespace
}  // namespace birkhoff
