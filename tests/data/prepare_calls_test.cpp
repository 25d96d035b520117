// Makes every file call of prepare fail, be interrupted, or transfer only one byte; or keeps files
// from growing. HDF5 makes none of these calls: it lays files out in memory.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>

#include "data/corpus/corpus.h"
#include "data/corpus/hdf5.h"
#include "data/corpus/verify.h"
#include "data/prepare/prepare.h"
#include "tests/cluster/base/faults.h"
#include "tests/cluster/base/tally.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;
using Content = std::map<std::string, std::string>;

// The tokenizers, a model trained earlier, text from a pipe, tables, and pairs.
class PrepareCalls : public testing::TestWithParam<const char*> {
 protected:
  PrepareCalls() {
    const bool pieces = kind() == "sentencepiece" || kind() == "model";
    write_text(folder_ / "in/a", sentences(pieces ? 20 : 3, 1));
    write_text(folder_ / "in/b", sentences(pieces ? 20 : 3, 2));
    options_ = prepare_options("", {folder_ / "in"}, kind());
    options_.shard_tokens = 300;
    if (kind() == "sentencepiece") options_.vocab_size = 300;
    if (kind() == "model") {
      options_.tokenizer = "sentencepiece";
      options_.vocab_size = 300;
      prepare("first");
      write_text(folder_ / "model", read_text(folder_ / "first/tokenizer.model"));
      options_.tokenizer = folder_ / "model";
      options_.vocab_size = 0;
    }
    if (kind() == "stream" || kind() == "table") options_.tokenizer = "words";
    if (kind() == "pairs") {
      options_.tokenizer = "words";
      options_.source_tokenizer = "chars";
      options_.paths = {folder_ / "in/a"};
      options_.target_paths = {folder_ / "in/b"};
      options_.valid_fraction = 0.3;
    }
    if (kind() == "table") {
      write_text(folder_ / "in/a", "text\tlabel\none row\tx\nanother\ty\n");
      write_text(folder_ / "in/b", "text\tlabel\na third row\ty\nand the last\tz\n");
      options_.table = TableColumns{"text", "label"};
      options_.valid_fraction = 0.25;
      options_.shard_tokens = 8;
    }
  }

  static std::string kind() { return GetParam(); }

  void prepare(const std::string& out) {
    options_.out = folder_ / out;
    if (kind() != "stream") {
      prepare_corpus(options_);
      return;
    }
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const std::string text = sentences(6, 3);
    EXPECT_EQ(::write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ::close(ends[1]);
    options_.paths = {"/proc/self/fd/" + std::to_string(ends[0])};
    try {
      prepare_corpus(options_);
    } catch (...) {
      ::close(ends[0]);
      throw;
    }
    ::close(ends[0]);
  }

  Content content(const std::string& out) const { return content_of(folder_ / out); }

  // An incomplete folder does not pass for a corpus, and the same command then completes it.
  void expect_unharmed(const std::string& out, const Content& expected) {
    if (path_exists(folder_ / (out + "/manifest.json"))) {
      verify_corpus(Corpus(folder_ / out));
      Content left = content(out);
      std::erase_if(left, [](const auto& file) { return file.first.starts_with('.'); });
      EXPECT_EQ(left, expected);
    }
    prepare(out);
    EXPECT_EQ(content(out), expected);
    remove_tree(folder_ / out);
  }

  TemporaryFolder folder_;
  PrepareOptions options_;
};

INSTANTIATE_TEST_SUITE_P(All, PrepareCalls,
                         testing::Values("bytes", "chars", "words", "sentencepiece", "model",
                                         "stream", "table", "pairs"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST_P(PrepareCalls, EveryOneMayFail) {
  prepare("undisturbed");
  const Content expected = content("undisturbed");
  const Content input = content("in");
  Tally tally("prepare, " + kind());
  // By default every fifth call for models, which are slow, and lasting faults only for bytes.
  const bool slow = kind() == "sentencepiece" || kind() == "model";
  const std::int64_t stride = slow && !all_faults() ? 5 : 1;
  for (const std::int64_t length : {std::int64_t{0}, kForever}) {
    if (length > 0 && kind() != "bytes" && !all_faults()) continue;
    bool happened = true;
    for (std::int64_t call = 0; happened; call += stride) {
      for (const int error : errors_at(call)) {
        tally.attempt([&] {
          std::string what;
          {
            const Faults faults(call, std::max(call, length), error);
            try {
              prepare("corpus");
            } catch (const Error& failure) {
              EXPECT_EQ(failure.code(), ExitCode::kStorage) << failure.what();
              what = failure.what();
            }
            happened = faults.happened();
            SCOPED_TRACE(testing::Message() << "call " << call << ": " << faults.failed_call()
                                            << " " << faults.failed_path());
            if (happened) faults.expect_told(what);
          }
          if (happened) expect_unharmed("corpus", expected);
        });
      }
      remove_tree(folder_ / "corpus");
    }
  }
  EXPECT_GT(tally.tried(), 30);
  EXPECT_EQ(content("in"), input);
}

TEST_P(PrepareCalls, InterruptedAndShortOnesChangeNothing) {
  prepare("undisturbed");
  {
    const Disturbances disturbances;
    prepare("corpus");
    EXPECT_GT(disturbances.num_interrupted(), 1000);
  }
  EXPECT_EQ(content("corpus"), content("undisturbed"));
}

TEST_P(PrepareCalls, FilesMayNotGrow) {
  prepare("undisturbed");
  const Content expected = content("undisturbed");
  Tally tally("prepare under limits of file sizes, " + kind());
  std::string what = "some";
  for (rlim_t limit = 0; !what.empty(); limit += all_faults() ? 101 : 499) {
    tally.attempt([&] {
      what.clear();
      {
        const FileSizeLimit limited(limit);
        try {
          prepare("corpus");
        } catch (const Error& failure) {
          EXPECT_EQ(failure.code(), ExitCode::kStorage) << failure.what();
          what = failure.what();
        }
      }
      if (what.empty()) return;
      EXPECT_THAT(what, HasSubstr("write of '" + folder_ / "corpus/"));
      EXPECT_THAT(what, HasSubstr("File too large"));
      EXPECT_THAT(what, HasSubstr("ulimit -f"));
      expect_unharmed("corpus", expected);
    });
  }
  EXPECT_GT(tally.tried(), 3);
}

// HDF5 never sees a disk fail, because it does not use one.
TEST(PrepareHdf5, TouchesNoFile) {
  const std::vector<std::uint32_t> values(100000, 7);
  std::vector<Hdf5DataSet> sets = {{"values", Hdf5Type::kU32, {100000}, values.data()}};
  const std::string expected = hdf5_image(sets);
  const std::size_t open_files = list_directory("/proc/self/fd").size();
  const FileSizeLimit limited(0);
  const Faults faults(0, kForever, EIO);
  EXPECT_EQ(hdf5_image(sets), expected);
  EXPECT_EQ(faults.num_calls(), 0);
  set_file_fault_hook({});
  EXPECT_EQ(list_directory("/proc/self/fd").size(), open_files);
}

}  // namespace
}  // namespace birkhoff
