// The memory of prepare_corpus. A program of its own: what other tests leave in the heap counts.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <string>

#include "cluster/base/files/file.h"
#include "data/prepare/prepare.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

long peak_memory_kib(const PrepareOptions& options) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      prepare_corpus(options);
    } catch (...) {
      _exit(1);  // not into the parent's tests
    }
    _exit(0);
  }
  int status = 0;
  rusage usage = {};
  EXPECT_EQ(wait4(child, &status, 0, &usage), child);
  EXPECT_EQ(status, 0);
  return usage.ru_maxrss;
}

TEST(Prepare, MemoryDoesNotGrowWithTheText) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep freed memory";
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
  for (const std::string tokenizer : {"bytes", "chars", "words", "sentencepiece"}) {
    PrepareOptions options =
        prepare_options(folder / ("small-" + tokenizer), {folder / "small"}, tokenizer);
    options.shard_tokens = 1 << 18;
    if (tokenizer == "sentencepiece") {
      options.vocab_size = 330;
      options.sample_bytes = 1 << 16;
    } else {
      options.chunk_bytes = 1 << 16;
    }
    const long small = peak_memory_kib(options);
    options.out = folder / ("large-" + tokenizer);
    options.paths = {folder / "large"};
    const long large = peak_memory_kib(options);
    // Memory that held the text would grow by all of it.
    EXPECT_LT((large - small) * 1024, grown_bytes / 4) << tokenizer;
  }
}

TEST(Prepare, MemoryDoesNotGrowWithTheRows) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep freed memory";
  TemporaryFolder folder;
  std::string rows;
  for (int i = 0; i < 40000; ++i) rows += fmt::format("row {} of many\tlabel {}\n", i, i % 7);
  for (const auto& [name, repeats] : std::map<std::string, int>{{"small", 8}, {"large", 41}}) {
    File table = File::create(folder / name);
    for (int i = 0; i < repeats; ++i) table.write_all(rows);
    table.close();
  }
  const std::int64_t grown_bytes = file_size(folder / "large") - file_size(folder / "small");
  ASSERT_GT(grown_bytes, 30 << 20);
  PrepareOptions options = prepare_options(folder / "small-corpus", {folder / "small"});
  options.table = TableColumns{"1", "2"};
  options.shard_tokens = 1 << 16;  // rows, too: both tables fill shards of tokens and of labels
  const long small = peak_memory_kib(options);
  options.out = folder / "large-corpus";
  options.paths = {folder / "large"};
  const long large = peak_memory_kib(options);
  EXPECT_LT((large - small) * 1024, grown_bytes / 4);
}

TEST(Prepare, MemoryDoesNotGrowWithThePairs) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep freed memory";
  TemporaryFolder folder;
  const auto write = [&](const std::string& name, const char* side, int repeats) {
    std::string lines;
    for (int i = 0; i < 40000; ++i) lines += fmt::format("{} {} of many\n", side, i);
    File file = File::create(folder / name);
    for (int i = 0; i < repeats; ++i) file.write_all(lines);
    file.close();
  };
  for (const auto& [name, repeats] : std::map<std::string, int>{{"small", 8}, {"large", 40}}) {
    write(name + ".source", "source", repeats);
    write(name + ".target", "target", repeats);
  }
  const std::int64_t grown_bytes =
      2 * (file_size(folder / "large.source") - file_size(folder / "small.source"));
  ASSERT_GT(grown_bytes, 30 << 20);
  PrepareOptions options = prepare_options(folder / "small-corpus", {folder / "small.source"});
  options.target_paths = {folder / "small.target"};
  options.shard_tokens = 1 << 16;
  const long small = peak_memory_kib(options);
  options.out = folder / "large-corpus";
  options.paths = {folder / "large.source"};
  options.target_paths = {folder / "large.target"};
  const long large = peak_memory_kib(options);
  EXPECT_LT((large - small) * 1024, grown_bytes / 4);
}

}  // namespace
}  // namespace birkhoff
