// `birkhoff analyse` on trained runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "cluster/base/files/file.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/said.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr std::int64_t kMaxPageBytes = 10'000'000;

constexpr char kMixed[] = R"(task { language_model {} }
data { corpus: "bytes" sequence_length: 32 }
model {
  layers: 2
  channels: 16
  heads: 4
  attention {
    group { heads: 2 mechanism { block_local { block: 8 } } }
    group { mechanism { routing { clusters: 4 } } }
  }
}
train { steps: 2 global_batch: 4 schedule { warmup_steps: 1 } }
)";

constexpr char kClassifier[] = R"(task { classification { classes: 3 } }
data { corpus: "labels" sequence_length: 16 }
model {
  layers: 1
  channels: 16
  heads: 2
  attention { group { mechanism { sinkformer { half_steps: 25 } } } }
}
train { steps: 2 global_batch: 4 schedule { warmup_steps: 1 } }
)";

class AnalyseCommand : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_analyse");
    make_good_input(folder_->path());
    fs::current_path(folder_->path());
    write_bytes("mixed.txtpb", kMixed);
    write_bytes("classifier.txtpb", kClassifier);
    train({"mixed.txtpb", "--run", "mixed1"});
    train({"mixed.txtpb", "--run", "mixed2", "--set", "train.seed=7"});
    train({"classifier.txtpb", "--run", "classes"});
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  static void train(std::vector<std::string> line) {
    line.insert(line.begin(), "train");
    const Finished trained = run_child({.line = birkhoff_line(line)});
    ASSERT_EQ(trained.code, 0) << trained.err;
  }

  // The page that the command line writes.
  static std::string page_of(std::vector<std::string> line) {
    line.insert(line.begin(), "analyse");
    line.insert(line.end(), {"--html", "page.html"});
    const Said said = birkhoff_says(line);
    EXPECT_EQ(said.code, 0) << said.err;
    return read_file("page.html", kMaxPageBytes);
  }

  static std::size_t count(const std::string& text, const std::string& part) {
    std::size_t found = 0;
    for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size())
      ++found;
    return found;
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(AnalyseCommand, ThePageHoldsEveryMapAndNamesNoUrl) {
  const std::string page = page_of({"mixed1", "--text", "text/one.txt"});
  EXPECT_EQ(count(page, "data-rows=\"32\" data-columns=\"32\""), 8u);
  EXPECT_EQ(count(page, "data-rows=\"32\" data-columns=\"4\""), 4u);  // clusters of tokens
  EXPECT_THAT(page, AllOf(HasSubstr("layer 1, head 3: routing"), HasSubstr("default-src 'none'"),
                          HasSubstr("block_local, routing")));
  for (const char* part : {"://", "src=", "href=", "url(", "@import", "data:"}) {
    EXPECT_THAT(page, Not(HasSubstr(part)));
  }
}

TEST_F(AnalyseCommand, PixelsAreTheWeights) {
  const std::string page =
      page_of({"mixed1", "--text", "text/one.txt", "--layers", "0", "--heads", "1"});
  std::smatch found;
  ASSERT_TRUE(std::regex_search(page, found, std::regex("data-pixels=\"([^\"]*)\"")));
  const std::string pixels = found[1];
  ASSERT_EQ(pixels.size(), 32u * 32u);
  for (std::size_t i = 0; i < 32; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < 32; ++j) {
      const double level = (pixels[i * 32 + j] - '0') / 63.0;
      const bool near = j <= i && j / 8 == i / 8;  // block_local
      if (!near) {
        EXPECT_EQ(level, 0) << i << ' ' << j;
      }
      sum += level * level;
    }
    EXPECT_NEAR(sum, 1, 0.1) << i;
  }
}

TEST_F(AnalyseCommand, DivergencesArePrinted) {
  const Said one = birkhoff_says(
      {"analyse", "mixed1", "--text", "text/one.txt", "--html", "page.html", "--tokens", "20"});
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_THAT(one.out, AllOf(HasSubstr("block_local, block_local"), HasSubstr("routing, routing"),
                             HasSubstr("first 20 tokens"), Not(HasSubstr("±"))));
  const Said both = birkhoff_says(
      {"analyse", "mixed1", "mixed2", "--text", "text/one.txt", "--html", "page.html"});
  EXPECT_THAT(both.out, HasSubstr("±"));
  EXPECT_EQ(birkhoff_says(
                {"analyse", "mixed1", "mixed1", "--text", "text/one.txt", "--html", "page.html"})
                    .out.find("± 0.0000") == std::string::npos,
            false);
}

TEST_F(AnalyseCommand, ASinkformersColumnsSumTo1) {
  const std::string page = page_of({"classes", "--text", "text/one.txt"});
  std::smatch found;
  const std::regex row("<td>sinkformer</td>(?:<td>[^<]*</td>){2}<td>([^<]*)</td><td>([^<]*)</td>");
  ASSERT_TRUE(std::regex_search(page, found, row));
  EXPECT_LE(std::stod(found[1]), 1e-4);
  EXPECT_LE(std::stod(found[2]), 1e-2);
}

TEST_F(AnalyseCommand, ATextCannotBreakThePage) {
  write_bytes("hostile", "</script><script>alert(1)</script>\x01\xff\"&<b>");
  const std::string page = page_of({"mixed1", "--text", "hostile"});
  EXPECT_EQ(count(page, "<script>"), 2u);
  EXPECT_EQ(count(page, "</script>"), 2u);
}

TEST_F(AnalyseCommand, LargeModelsGetAsManyPicturesAsFit) {
  train({"mixed.txtpb", "--run", "large", "--set", "model.layers=10", "--set", "model.heads=8",
         "--set", "model.channels=128", "--set", "data.sequence_length=264", "--set",
         "model.attention.0.group.1.mechanism.routing.share_query_key=false"});
  const std::string page = page_of({"large", "--text", "text/one.txt", "--tokens", "264"});
  EXPECT_EQ(count(page, "height=\"256\" data-rows=\"264\" data-columns=\"264\""), 64u);
  EXPECT_EQ(count(page, "data-rows=\"264\" data-columns=\"4\""), 64u);
  EXPECT_THAT(page, AllOf(HasSubstr("maps of layers 0, 1, 2, 3, 5, 6, 7, 8 and heads"),
                          HasSubstr("32 pictures of choices are left out")));
}

}  // namespace
}  // namespace birkhoff
