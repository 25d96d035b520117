#include "data/prepare.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "data/corpus.h"
#include "data/documents.h"
#include "data/shard_reader.h"
#include "data/text_counts.h"
#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

std::vector<std::int32_t> tokens_of(const Corpus& corpus, const std::string& split) {
  StreamReader reader(corpus, split, "tokens");
  std::vector<std::int64_t> ids(static_cast<std::size_t>(reader.elements()));
  reader.read(0, reader.elements(), ids.data());
  return {ids.begin(), ids.end()};
}

std::string text_of(const Corpus& corpus, const std::string& split) {
  return corpus.tokenizer()->decode(tokens_of(corpus, split));
}

// Every file of a folder and its content.
std::map<std::string, std::string> content_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const std::string& name : list_directory(folder))
    files[name] = read_text(folder + "/" + name);
  return files;
}

std::string sentences(int count, int seed) {
  const std::vector<std::string> words = {"the",     "na\u00efve", "transformer", "attends",
                                          "to",      "sorted",     "blocks",      "of",
                                          "\u20ac5", "tokens"};
  std::mt19937 random(static_cast<unsigned>(seed));
  std::string text;
  for (int i = 0; i < count; ++i) {
    for (int w = 0; w < 8; ++w) text += words[random() % words.size()] + " ";
    text += "end.\n";
  }
  return text;
}

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

TEST(Prepare, DocumentsOfAFolderKeepTogetherInSortedOrder) {
  TemporaryFolder folder;
  std::map<std::string, std::string> texts;
  for (int i = 0; i < 40; ++i) texts[fmt::format("{}/{:02}", i % 3, i)] = sentences(2, i);
  for (const auto& [name, text] : texts) write_text(folder / ("in/" + name), text);
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.test_fraction = 0.2;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.vocabulary(), 257);
  EXPECT_EQ(corpus.split("train").counts().documents(), 28);
  EXPECT_EQ(corpus.split("valid").counts().documents(), 4);
  EXPECT_EQ(corpus.split("test").counts().documents(), 8);
  std::multiset<std::string> found;
  for (const std::string split : {"train", "valid", "test"}) {
    std::string document, last_name;
    for (const std::int32_t id : tokens_of(corpus, split)) {
      if (id != 256) {
        document += static_cast<char>(id);
        continue;
      }
      found.insert(document);
      for (const auto& [name, text] : texts) {
        if (text != document) continue;
        EXPECT_LT(last_name, name) << split;
        last_name = name;
      }
      document.clear();
    }
    EXPECT_EQ(document, "");
  }
  std::multiset<std::string> expected;
  for (const auto& entry : texts) expected.insert(entry.second);
  EXPECT_EQ(found, expected);
}

TEST(SplitRule, ManyDocumentsFollowTheirKeys) {
  InputScan scan;
  scan.documents = 100000;
  for (std::size_t i = 0; i <= kMaxRanked; ++i) scan.keys.push_back(i);
  const SplitRule rule(scan, 0.1, 0.05);
  std::array<int, 3> counts = {};
  for (int i = 0; i < 20000; ++i) {
    const Document document = {"", fmt::format("file{}", i), 10};
    const auto pieces = rule.pieces(document);
    ASSERT_EQ(pieces.size(), 1u);
    ++counts[pieces[0].split];
  }
  EXPECT_NEAR(counts[kValid], 2000, 4 * std::sqrt(1800.0));
  EXPECT_NEAR(counts[kTest], 1000, 4 * std::sqrt(950.0));
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

TEST(Prepare, ReadsStreams) {
  TemporaryFolder folder;
  const std::string text = sentences(500, 4);
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const PrepareOptions options = prepare_options(folder / "corpus", {pipe}, "chars");
  const auto feed = [&](const std::string& content) {
    return std::thread([&pipe, content] {
      File file = File::open_for_append(pipe);
      file.write_all(content);
      file.close();
    });
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
  std::thread other = feed(text + "more");
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); },
               {folder / "corpus", "other text"});
  other.join();
}

TEST(Prepare, RefusesWhatItCannotUseAndHarmsNothing) {
  TemporaryFolder folder;
  write_text(folder / "text", "text enough for two splits");
  write_text(folder / "mine/letter", "dear");
  write_text(folder / "latin", "caf\xe9 au lait");
  write_text(folder / "empty", "");
  const auto usage = [&](const PrepareOptions& options, const std::vector<std::string>& fragments) {
    expect_error(
        ExitCode::kUsage, [&] { prepare_corpus(options); }, fragments);
  };
  const PrepareOptions good = prepare_options(folder / "corpus", {folder / "text"});
  PrepareOptions bad = good;
  bad.out = folder / "mine";
  usage(bad, {folder / "mine", "neither empty nor a corpus"});
  EXPECT_EQ(read_text(folder / "mine/letter"), "dear");
  bad.out = folder / "text";
  usage(bad, {"--out", "is a file"});
  bad.out = "";
  usage(bad, {"--out"});
  for (const double fraction : {-0.1, 1.0, 1.5, std::nan("")}) {
    bad = good;
    bad.valid_fraction = fraction;
    usage(bad, {"--valid"});
  }
  bad = good;
  bad.valid_fraction = bad.test_fraction = 0.5;
  usage(bad, {"--valid 0.5 --test 0.5"});
  bad = good;
  bad.vocab_size = 100;
  usage(bad, {"--vocab-size 100", "bytes"});
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1}, std::int64_t{1} << 40}) {
    bad = prepare_options(folder / "corpus", {folder / "text"}, "words");
    bad.vocab_size = size;
    usage(bad, {"--vocab-size", "words"});
  }
  bad = good;
  bad.tokenizer = "letters";
  usage(bad, {"--tokenizer letters"});
  bad = good;
  bad.paths = {};
  usage(bad, {"PATH"});
  bad.paths = {folder / "nowhere"};
  usage(bad, {"nowhere"});
  bad.paths = {folder / "empty"};
  usage(bad, {"no text", "1 empty"});
  write_text(folder / "tiny", "a");
  bad.paths = {folder / "tiny"};
  usage(bad, {"tiny", "split"});
  bad.paths = {folder / "text", folder / "latin"};
  bad.test_fraction = 0.1;
  usage(bad, {"2 documents"});
  for (const std::string tokenizer : {"chars", "words", "sentencepiece"}) {
    bad = prepare_options(folder / "corpus", {folder / "latin"}, tokenizer);
    expect_error(ExitCode::kData, [&] { prepare_corpus(bad); },
                 {folder / "latin", "byte 3", "UTF-8"});
  }
  EXPECT_FALSE(path_exists(folder / "corpus/manifest.json"));
  prepare_corpus(good);  // after all those failures
  verify_corpus(Corpus(folder / "corpus"));
}

TEST(Prepare, AFinishedCorpusIsLeftAlone) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(10, 1));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"});
  prepare_corpus(options);
  const auto content = content_of(folder / "corpus");
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  PrepareOptions other = options;
  other.valid_fraction = 0.2;
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(other); },
               {folder / "corpus", "other options", "valid 0.1"});
  write_text(folder / "text", sentences(10, 2));
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); },
               {folder / "corpus", "other text"});
  EXPECT_EQ(content_of(folder / "corpus"), content);
}

TEST(Prepare, TheCorpusMayLieInItsInput) {
  TemporaryFolder folder;
  write_text(folder / "in/text", sentences(10, 1));
  const PrepareOptions options = prepare_options(folder / "in/corpus", {folder / "in"});
  prepare_corpus(options);
  EXPECT_EQ(Corpus(folder / "in/corpus").split("train").counts().documents(), 1);
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
}

TEST(Prepare, InputThatChangesMeanwhileIsNoticed) {
  TemporaryFolder folder;
  write_text(folder / "in/a", sentences(10, 1));
  write_text(folder / "in/b", sentences(10, 2));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"}, "chars");
  const auto change = [&](const PrepareProgress& progress) {
    if (progress.phase == "build vocabulary")
      write_text(folder / "in/a", sentences(10, 1) + "more");
  };
  expect_error(ExitCode::kData, [&] { prepare_corpus(options, change); }, {"changed"});
  EXPECT_FALSE(path_exists(folder / "corpus/manifest.json"));
}

TEST(Prepare, ReportsProgress) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(100, 1));
  std::vector<PrepareProgress> reports;
  prepare_corpus(prepare_options(folder / "corpus", {folder / "text"}, "chars"),
                 [&](const PrepareProgress& progress) { reports.push_back(progress); });
  ASSERT_GE(reports.size(), 2u);
  EXPECT_EQ(reports.front().phase, "build vocabulary");
  EXPECT_EQ(reports.back().phase, "encode");
  EXPECT_EQ(reports.back().done_bytes, file_size(folder / "text"));
  EXPECT_EQ(reports.back().total_bytes, reports.back().done_bytes);
  EXPECT_EQ(reports.back().eta_seconds, 0);
}

// Whatever file call fails, there is one clear error, no manifest and no lost file; the same
// command then makes the very corpus that an undisturbed one makes.
TEST(Prepare, EveryFileCallMayFail) {
  TemporaryFolder folder;
  write_text(folder / "in/a", sentences(3, 1));
  write_text(folder / "in/b", sentences(3, 2));
  const auto options = [&](const std::string& out) {
    PrepareOptions result = prepare_options(out, {folder / "in"}, "chars");
    result.shard_tokens = 300;
    return result;
  };
  prepare_corpus(options(folder / "undisturbed"));
  const auto expected = content_of(folder / "undisturbed");
  const auto input = content_of(folder / "in");
  for (const int reason : {ENOSPC, EIO}) {
    bool reached = true;
    for (std::int64_t nth = 0; reached; nth += reason == ENOSPC ? 1 : 7) {
      const std::string out = folder / fmt::format("corpus-{}-{}", reason, nth);
      reached = false;
      {
        std::int64_t count = 0;
        const FaultHook hook([&](const char*, const std::string&, std::int64_t) {
          if (count++ != nth) return 0;
          reached = true;
          return reason;
        });
        try {
          prepare_corpus(options(out));
          EXPECT_FALSE(reached) << "a failed call was not noticed: call " << nth;
        } catch (const Error& error) {
          EXPECT_TRUE(error.code() == ExitCode::kStorage || error.code() == ExitCode::kData ||
                      error.code() == ExitCode::kUsage)
              << error.what();
        }
      }
      prepare_corpus(options(out));
      ASSERT_EQ(content_of(out), expected) << "after call " << nth << " failed";
      remove_tree(out);
    }
  }
  EXPECT_EQ(content_of(folder / "in"), input);
}

TEST(Prepare, ShortTransfersChangeNothing) {
  TemporaryFolder folder;
  write_text(folder / "in/a", sentences(1, 1));
  write_text(folder / "in/b", sentences(1, 2));
  prepare_corpus(prepare_options(folder / "expected", {folder / "in"}, "words"));
  std::int64_t count = 0;
  const FaultHook hook([&](const char*, const std::string&, std::int64_t) {
    return ++count % 3 == 0 ? kShortTransfer : 0;
  });
  prepare_corpus(prepare_options(folder / "corpus", {folder / "in"}, "words"));
  set_file_fault_hook({});
  EXPECT_EQ(content_of(folder / "corpus"), content_of(folder / "expected"));
}

// Killed at any moment: nothing that looks finished, and the same command finishes the work.
TEST(Prepare, SurvivesKill) {
  TemporaryFolder folder;
  for (int i = 0; i < 6; ++i) write_text(folder / fmt::format("in/{}", i), sentences(200, i));
  PrepareOptions options = prepare_options(folder / "expected", {folder / "in"}, "words");
  options.shard_tokens = 1000;
  options.chunk_bytes = 4096;
  prepare_corpus(options);
  const auto expected = content_of(folder / "expected");
  int killed = 0;
  for (int trial = 0; trial < 12; ++trial) {
    options.out = folder / fmt::format("corpus{}", trial);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      prepare_corpus(options);
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2 + 4 * trial));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    killed += WIFSIGNALED(status);
    if (path_exists(options.out + "/manifest.json")) verify_corpus(Corpus(options.out));
    prepare_corpus(options);
    ASSERT_EQ(content_of(options.out), expected) << "trial " << trial;
  }
  EXPECT_GT(killed, 0);
}

TEST(Prepare, TwoAtOnceDoNotMix) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(50, 1));
  const PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"});
  bool tried = false;
  prepare_corpus(options, [&](const PrepareProgress&) {
    if (tried) return;
    tried = true;
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        prepare_corpus(options);
      } catch (const Error& error) {
        _exit(static_cast<int>(error.code()));
      }
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), static_cast<int>(ExitCode::kUsage));
  });
  EXPECT_TRUE(tried);
  verify_corpus(Corpus(folder / "corpus"));
}

long peak_memory_kib(const PrepareOptions& options) {
  const pid_t child = fork();
  if (child == 0) {
    prepare_corpus(options);
    _exit(0);
  }
  int status = 0;
  rusage usage = {};
  EXPECT_EQ(wait4(child, &status, 0, &usage), child);
  EXPECT_EQ(status, 0);
  return usage.ru_maxrss;
}

TEST(Prepare, MemoryDoesNotGrowWithTheText) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep freed memory";
#endif
  TemporaryFolder folder;
  std::string text = sentences(4000, 1);  // 230 kB
  while (text.size() < (2 << 20)) text += text;
  {
    File large = File::create(folder / "large");
    for (int i = 0; i < 6; ++i) large.write_all(text);
    large.close();
  }
  write_text(folder / "small", text);
  const std::int64_t grown_bytes = file_size(folder / "large") - file_size(folder / "small");
  ASSERT_GT(grown_bytes, 10 << 20);
  for (const std::string tokenizer : {"bytes", "chars", "words"}) {
    PrepareOptions options =
        prepare_options(folder / ("small-" + tokenizer), {folder / "small"}, tokenizer);
    options.shard_tokens = 1 << 18;
    options.chunk_bytes = 1 << 16;
    const long small = peak_memory_kib(options);
    options.out = folder / ("large-" + tokenizer);
    options.paths = {folder / "large"};
    const long large = peak_memory_kib(options);
    EXPECT_LT((large - small) * 1024, grown_bytes / 4) << tokenizer;
  }
}

TEST(Prepare, TinyShakespeareHas65Characters) {
  const char* data = std::getenv("BIRKHOFF_DATA");
  if (data == nullptr)
    GTEST_SKIP() << "BIRKHOFF_DATA, the folder with tinyshakespeare.txt.gz, is not set";
  TemporaryFolder folder;
  const std::string command =
      fmt::format("gzip -dc '{}/tinyshakespeare.txt.gz' > '{}'", data, folder / "text");
  ASSERT_EQ(std::system(command.c_str()), 0);
  prepare_corpus(prepare_options(folder / "corpus", {folder / "text"}, "chars"));
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.vocabulary(), 65);
  EXPECT_EQ(corpus.stream("train", "tokens").elements(), 1003854);  // 90% of 1,115,394
  EXPECT_EQ(corpus.split("valid").counts().bytes(), 111540);
}

}  // namespace
}  // namespace birkhoff
