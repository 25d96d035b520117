// The interpretation of PATH, --train, --valid and --test by `prepare`.
#include <gtest/gtest.h>

#include <sstream>

#include "launcher/app.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

class SplitArguments : public testing::Test {
 protected:
  SplitArguments() {
    std::filesystem::current_path(folder_ / "");
    for (int i = 0; i < 4; ++i) write_text(std::string("./") + "abcd"[i], sentences(30, i));
  }
  ~SplitArguments() override { std::filesystem::current_path("/"); }

  // Runs a `prepare` that must succeed; returns its messages.
  static std::string prepare(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "prepare");
    std::ostringstream out, err;
    EXPECT_EQ(run_app(arguments, out, err), 0) << err.str();
    return err.str();
  }
  static std::string texts(const std::string& folder) {
    const Corpus corpus(folder);
    std::string all;
    for (const auto& split : corpus.manifest().split())
      all += split.name() + ":" + text_of(corpus, split.name());
    return all;
  }

  TemporaryFolder folder_;
};

TEST_F(SplitArguments, APathMayFollowAFraction) {
  prepare({"--out", "plain", "--valid", "0.2", "--test=0.1", "--", "a", "b", "c", "d"});
  prepare({"a", "--valid", "0.2", "b", "c", "--test", "0.1", "d", "--out", "mixed"});
  prepare({"--valid=0.2", "a", "b", "--out", "after", "c", "d", "--test", "1e-1"});
  EXPECT_EQ(texts("mixed"), texts("plain"));
  EXPECT_EQ(texts("after"), texts("plain"));
}

TEST_F(SplitArguments, TextsOfSplitsComeInAnyOrder) {
  const auto text = [](const char* name) { return read_text(name); };
  prepare({"--out", "all", "--test", "d", "--train", "a", "b", "--valid", "c"});
  EXPECT_EQ(texts("all"),
            "train:" + text("a") + text("b") + "valid:" + text("c") + "test:" + text("d"));
  prepare({"--out", "none", "--train", "a", "--valid", "0", "--train", "b"});
  EXPECT_EQ(texts("none"), "train:" + text("a") + text("b"));
  // A tenth is held out for validation, as without --train.
  prepare({"--out", "default", "--train", "a", "--test", "d"});
  const Corpus corpus("default");
  EXPECT_EQ(text_of(corpus, "train") + text_of(corpus, "valid"), text("a"));
  EXPECT_GT(text_of(corpus, "valid").size(), text("a").size() / 11);
  EXPECT_EQ(text_of(corpus, "test"), text("d"));
}

TEST_F(SplitArguments, AFileNamedAsANumberIsAskedFor) {
  write_text("./0.2", "ccccc");
  const std::string said = prepare({"--out", "fraction", "--valid", "0.2", "a"});
  EXPECT_NE(said.find("--valid 0.2 is read as a fraction; the file of that name is ./0.2"),
            std::string::npos)
      << said;
  EXPECT_EQ(prepare({"--out", "file", "--train", "a", "--valid", "./0.2"}), "");
  EXPECT_EQ(text_of(Corpus("file"), "valid"), "ccccc");
  EXPECT_EQ(prepare({"--out", "train", "--valid", "0", "./0.2"}), "");
}

TEST_F(SplitArguments, MessagesCount) {
  write_text("./in/empty", "");
  write_text("./in/text", "text");
  std::ostringstream out, err;
  ASSERT_EQ(run_app({"prepare", "--out", "corpus", "--valid", "0", "in"}, out, err), 0);
  EXPECT_EQ(err.str(), "prepare: skipped 1 empty file\n");
  EXPECT_NE(out.str().find("1 document, 1 sentence, 1 word, 4 characters, 4 bytes"),
            std::string::npos)
      << out.str();
  EXPECT_NE(out.str().find("in 1 shard ("), std::string::npos) << out.str();
}

}  // namespace
}  // namespace birkhoff
