// Tests inspect, runs and compare on runs in every state.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cluster/base/files/file.h"
#include "launcher/runs/text_table.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/said.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

class RunsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_runs");
    fs::create_directories(folder_->path() / "good");
    make_good_input(folder_->path() / "good");
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }
  void SetUp() override {
    fs::current_path("/");
    fs::remove_all(folder_->path() / "scratch");
    fs::create_directories(folder_->path() / "scratch/runs");
    fs::current_path(folder_->path() / "scratch");
  }

  // Makes a copy of the run of 4 steps.
  static std::string make_run(const std::string& name) {
    const std::string run = "runs/" + name;
    fs::create_directories(fs::path(run).parent_path());
    fs::copy(folder_->path() / "good/run", run, fs::copy_options::recursive);
    return run;
  }

  static nlohmann::json json_of(const std::string& run) {
    const Said said = birkhoff_says({"runs", run, "--json"});
    EXPECT_EQ(said.code, 0) << said.err;
    return nlohmann::json::parse(said.out);
  }

  static std::string state_of(const std::string& run) { return json_of(run).at("state"); }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(RunsTest, StatesAreThoseOfTheFiles) {
  const std::string run = make_run("a");
  nlohmann::json figures = json_of(run);
  EXPECT_EQ(figures.at("state"), "finished");
  EXPECT_EQ(figures.at("step"), 4);
  EXPECT_EQ(figures.at("steps"), 4);
  EXPECT_GT(figures.at("loss"), 1);
  EXPECT_GT(figures.at("evaluation_loss"), 1);
  EXPECT_GT(figures.at("tokens_per_second"), 0);
  EXPECT_GT(figures.at("seconds"), 0);
  {
    const FileLock lock(run + "/lock", "the run");
    EXPECT_EQ(state_of(run), "running");
    EXPECT_THAT(birkhoff_says({"inspect", run}).out,
                HasSubstr("running (process " + std::to_string(getpid()) + " on "));
  }
  replace_text(run + "/config.txtpb", "steps: 4", "steps: 9");
  EXPECT_EQ(state_of(run), "stopped");
  append_bytes(run + "/metrics.jsonl", "{\"step\":5,\"loss\":null}\n{\"step\":6,\"lo");
  figures = json_of(run);
  EXPECT_EQ(figures.at("state"), "diverged");
  EXPECT_EQ(figures.at("step"), 5);
  EXPECT_TRUE(figures.at("loss").is_null());
  write_bytes(run + "/metrics.jsonl", "");
  remove_one(run + "/checkpoints");
  figures = json_of(run);
  EXPECT_EQ(figures.at("state"), "new");
  EXPECT_EQ(figures.at("step"), 0);
  EXPECT_EQ(birkhoff_says({"inspect", run}).code, 0);
}

TEST_F(RunsTest, RunsAreFoundBelowAndThroughLinksButOnce) {
  make_run("a");
  make_run("deep/er/b");
  make_run(".hidden/c");
  make_run("a/checkpoints/inside");  // inside a run
  fs::copy(folder_->path() / "good/run", "elsewhere", fs::copy_options::recursive);
  fs::create_directory_symlink("../elsewhere", "runs/link");
  fs::create_directory_symlink("a", "runs/latest");
  fs::create_directory_symlink("..", "runs/deep/up");
  const Said said = birkhoff_says({"runs", "runs", "--json"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(said.err, "");
  std::multiset<std::string> names;
  std::istringstream lines(said.out);
  for (std::string line; std::getline(lines, line);) {
    names.insert(nlohmann::json::parse(line).at("run"));
  }
  EXPECT_THAT(names, testing::ElementsAre("runs/a", "runs/deep/er/b", "runs/link"));
}

TEST_F(RunsTest, NewestComeFirstAndDamagedOnesAreListed) {
  const auto now = fs::file_time_type::clock::now();
  for (const std::string name : {"b", "a", "c"}) {
    const std::string run = make_run(name);
    fs::last_write_time(run + "/metrics.jsonl", now - std::chrono::hours(name == "b" ? 0 : 1));
  }
  make_run("broken");
  write_bytes("runs/broken/metrics.jsonl", "?\n");
  make_run("half");
  remove_one("runs/half/config.txtpb");
  const Said said = birkhoff_says({"runs", "runs"});
  EXPECT_EQ(said.code, 0) << said.err;
  std::vector<std::string> names;
  std::istringstream lines(said.out);
  for (std::string line; std::getline(lines, line);) names.push_back(line.substr(line.rfind(' ')));
  EXPECT_THAT(names, testing::ElementsAre(" run", " runs/b", " runs/a", " runs/c", " runs/broken",
                                          " runs/half"));
  EXPECT_THAT(said.out, HasSubstr("damaged"));
  EXPECT_THAT(said.err, HasSubstr("warning: runs/broken/metrics.jsonl:1: not a line of metrics"));
  EXPECT_THAT(said.err, HasSubstr("warning: runs/half/config.txtpb: cannot be opened"));
}

// Each run has one line, and columns align with their heads, whatever the names contain.
TEST_F(RunsTest, NamesBreakNoColumn) {
  for (const std::string& name :
       {std::string(200, 'n'), std::string("line\nend"), std::string("\x1b[31mred"),
        std::string("\xe6\x97\xa5\xe6\x9c\xac"), std::string("not utf-8 \xff")}) {
    make_run(name);
  }
  const Said said = birkhoff_says({"runs", "runs"});
  EXPECT_EQ(said.code, 0) << said.err;
  std::istringstream lines(said.out);
  std::string head;
  std::getline(lines, head);
  const std::size_t column = head.rfind("run");
  int num_lines = 0;
  for (std::string line; std::getline(lines, line); ++num_lines) {
    EXPECT_EQ(line.substr(column, 5), "runs/") << line;
    for (const unsigned char c : line) EXPECT_GE(c, 0x20) << line;
  }
  EXPECT_EQ(num_lines, 5);
  EXPECT_EQ(birkhoff_says({"runs", "runs", "--json"}).code, 0);
}

TEST_F(RunsTest, InspectSaysHowARunWent) {
  const std::string run = make_run("a");
  write_bytes(run + "/metrics.jsonl",
              "{\"step\":1,\"loss\":2,\"tokens_per_second\":10,\"step_ms\":100}\n"
              "{\"step\":1,\"split\":\"test\",\"loss\":0.5}\n"
              "{\"step\":2,\"loss\":1.25,\"tokens_per_second\":30,\"step_ms\":300}\n"
              "{\"step\":2,\"split\":\"valid\",\"loss\":1.5,\"bits_per_byte\":0.75}\n"
              "{\"step\":4,\"loss\":3,\"tokens_per_second\":20,\"step_ms\":200}\n"
              "{\"step\":4,\"split\":\"valid\",\"loss\":1.75,\"bits_per_byte\":1.25}\n");
  std::string text = birkhoff_says({"inspect", run}).out;
  for (const char* part :
       {"run          runs/a\n", "state        finished, step 4 of 4\n",
        "mechanism    sinkhorn { block: 8 max_blocks: 4 }\n", "optimizer    adamw, cosine\n",
        "data         corpus, sequences of 32 tokens, 4 per step\n",
        "train loss   last 3.0000 at step 4, best 1.2500 at step 2\n",
        "valid loss   last 1.7500 at step 4, best 1.5000 at step 2\n", "bits_per_byte 1.2500\n",
        "time         0:01, without evaluations and saves\n",
        "speed        20 tokens/s, 200.0 ms per step\n",
        "checkpoints  step-00000002, step-00000004\n", "parameters;"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  append_bytes(run + "/metrics.jsonl", "{\"step\":5,\"loss\":1,\"elapsed_seconds\":75.2}\n");
  EXPECT_THAT(birkhoff_says({"inspect", run}).out, HasSubstr("time         1:15\n"));
}

TEST_F(RunsTest, CompareDrawsCurvesAndPrintsWhatDiffers) {
  const std::string a = make_run("a"), b = make_run("b <&>"), c = make_run("c");
  replace_text(b + "/config.txtpb", "steps: 4", "steps: 8");
  replace_text(b + "/config.txtpb", "block: 8", "block: 16");
  replace_text(b + "/config.txtpb", "max_blocks: 4", "max_blocks: 2");
  write_bytes(c + "/metrics.jsonl", "");
  const Tree before = read_tree();
  const Said said = birkhoff_says({"compare", a, b, c, "--svg", "out.svg"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(lost_files(before, read_tree(), /*train=*/false), "");
  for (const char* part :
       {"1  finished   4/4", "2  stopped    4/8", "runs/b <&>\n", "curves: out.svg\n",
        "model.attention.0.group.0.mechanism.sinkhorn.block       8  16  8\n",
        "model.attention.0.group.0.mechanism.sinkhorn.max_blocks  4  2   4\n",
        "train.steps                                              4  8   4\n"}) {
    EXPECT_THAT(said.out, HasSubstr(part));
  }
  EXPECT_THAT(said.out, Not(HasSubstr("data.corpus")));
  const std::string svg = read_bytes("out.svg");
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, HasSubstr(">1  runs/a</text>"));
  EXPECT_THAT(svg, HasSubstr(">2  runs/b &lt;&amp;&gt;</text>"));
  EXPECT_THAT(birkhoff_says({"compare", a, c}).out, HasSubstr("all settings are equal\n"));
  EXPECT_TRUE(fs::exists("compare.svg"));
}

TEST(TextTable, ColumnsAreAsWideAsTheirCells) {
  EXPECT_EQ(text_table({{"a"}, {"number", true}, {"name"}},
                       {{"\xc3\xa9", "1", "x"}, {"\xe6\x97\xa5", "22", "y\nz"}}),
            "a   number  name\n"
            "\xc3\xa9        1  x\n"
            "\xe6\x97\xa5      22  y?z\n");
}

}  // namespace
}  // namespace birkhoff
