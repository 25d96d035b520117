// prepare_corpus when things go wrong: bad input, kills, and two commands at once.
#include "data/prepare/prepare.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "data/corpus/corpus.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/text_counts.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

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
  for (const std::string tokenizer : {"chars", "words", "sentencepiece"}) {
    bad = prepare_options(folder / "corpus", {folder / "latin"}, tokenizer);
    expect_error(ExitCode::kData, [&] { prepare_corpus(bad); },
                 {folder / "latin", "byte 3", "UTF-8"});
  }
  EXPECT_FALSE(path_exists(folder / "corpus/manifest.json"));
  prepare_corpus(good);  // after all those failures
  verify_corpus(Corpus(folder / "corpus"));
}

// A failed prepare leaves its own files in the folder. When they are removed, a user's files stay,
// even if their names are similar to ours.
TEST(Prepare, NeverRemovesAFileOfTheUser) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(10, 1));
  const PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"}, "chars");
  const std::vector<std::string> ours = {"train-tokens-00000.h5",
                                         "valid-tokens-00012.h5.tmp",
                                         "test-tokens-123456.h5",
                                         "train-label-00000.h5",
                                         "test-image-00003.h5",
                                         ".finished-test-00003",
                                         ".finished-train-00000.tmp-node-1.x-42-00c0ffee",
                                         "tokenizer.chars",
                                         "tokenizer.model.tmp-node-1.x-42-00c0ffee",
                                         "manifest.json.tmp-a-7-00000000",
                                         ".input-0",
                                         ".unfinished"};
  const auto leave_unfinished = [&] {
    remove_tree(folder / "corpus");
    for (const std::string& name : ours) write_text(folder / ("corpus/" + name), "left");
  };
  for (const std::string name :
       {"train-mytext.txt", "train-tokens-00000.h5.bak", "train-tokens-1.h5", "valid-",
        "dev-tokens-00000.h5", "train-labels-00000.h5", "tokenizer.md", "tokenizer.model.tmp",
        "tokenizer.words.tmp-old", "manifest.json.orig", "manifest-json", ".input-", ".input-old",
        ".unfinished2", "letter", "train-images-00000.h5", ".finished-train",
        ".finished-dev-00000"}) {
    leave_unfinished();
    write_text(folder / ("corpus/" + name), "dear");
    const auto before = content_of(folder / "corpus");
    expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); },
                 {folder / "corpus", fmt::format("'{}'", name)});
    EXPECT_EQ(content_of(folder / "corpus"), before) << name;
  }
  leave_unfinished();
  prepare_corpus(options);
  EXPECT_EQ(list_directory(folder / "corpus"),
            (std::vector<std::string>{"manifest.json", "tokenizer.chars", "train-tokens-00000.h5",
                                      "valid-tokens-00000.h5"}));
}

TEST(Prepare, RefusesTextInItsOwnFolder) {
  TemporaryFolder folder;
  write_text(folder / "corpus/.unfinished", "");
  write_text(folder / "corpus/train-tokens-00000.h5", sentences(10, 1));
  const auto before = content_of(folder / "corpus");
  for (const std::string& path :
       {folder / "corpus/train-tokens-00000.h5", folder / "corpus/../corpus", folder / "corpus"}) {
    expect_error(ExitCode::kUsage,
                 [&] { prepare_corpus(prepare_options(folder / "corpus", {path})); },
                 {path, "lies in --out"});
  }
  write_text(folder / "text", sentences(10, 1));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"});
  options.tokenizer = folder / "corpus/train-tokens-00000.h5";
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); },
               {options.tokenizer, "lies in --out"});
  EXPECT_EQ(content_of(folder / "corpus"), before);
}

TEST(Prepare, RefusesACorpusAsText) {
  TemporaryFolder folder;
  write_text(folder / "in/text", sentences(10, 1));
  write_text(folder / "in/manifest.json", "{\"of\": \"something else\"}");
  prepare_corpus(prepare_options(folder / "in/corpus", {folder / "in"}));
  EXPECT_EQ(Corpus(folder / "in/corpus").split("train").counts().documents(), 2);
  for (const std::string& input : {folder / "in/corpus", folder / "in"}) {
    expect_error(ExitCode::kUsage,
                 [&] { prepare_corpus(prepare_options(folder / "other", {input})); },
                 {folder / "in/corpus", "is a corpus"});
  }
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

// The time that training takes does not affect the estimate for encoding.
TEST(Prepare, TimeLeftIsForgottenAfterTraining) {
  TemporaryFolder folder;
  write_text(folder / "text", sentences(200, 1));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "text"}, "sentencepiece");
  options.vocab_size = 330;
  options.chunk_bytes = file_size(folder / "text") / 3;
  std::vector<PrepareProgress> encoding;
  prepare_corpus(options, [&](const PrepareProgress& progress) {
    if (progress.phase == "train SentencePiece")
      std::this_thread::sleep_for(std::chrono::seconds(2));
    if (progress.phase == "encode") encoding.push_back(progress);
  });
  ASSERT_GE(encoding.size(), 2u);
  EXPECT_LT(encoding.front().done_bytes, encoding.front().total_bytes);
  EXPECT_GT(encoding.front().elapsed_seconds, 2);
  EXPECT_GE(encoding.front().eta_seconds, 0);
  EXPECT_LT(encoding.front().eta_seconds, 1);
}

// A kill at any moment leaves nothing that looks finished, and the same command finishes the work.
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

TEST(Prepare, PlaysHave65Characters) {
  TemporaryFolder folder;
  write_plays(folder / "text");
  prepare_corpus(prepare_options(folder / "corpus", {folder / "text"}, "chars"));
  const Corpus corpus(folder / "corpus");
  const std::int64_t bytes = file_size(folder / "text");
  EXPECT_GT(bytes, 20000);
  EXPECT_EQ(corpus.vocabulary(), 65);
  EXPECT_EQ(corpus.stream("train", "tokens").elements(), bytes * 9 / 10);
  EXPECT_EQ(corpus.split("valid").counts().bytes(), bytes - bytes * 9 / 10);
}

}  // namespace
}  // namespace birkhoff
