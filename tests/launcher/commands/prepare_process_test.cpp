// `birkhoff prepare` on ranks: the same bytes as one process, also after stops and kills.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "tests/data/images/image_files.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"
#include "tests/launcher/training.h"

namespace birkhoff {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// An input, and the options to prepare it.
struct Input {
  const char* name;
  std::string options;
};

void PrintTo(const Input& input, std::ostream* out) { *out << input.name; }

// The working directory holds the input `in` and `one`, the corpus that one process makes of it.
class PrepareOnRanks : public testing::TestWithParam<Input> {
 protected:
  static void SetUpTestSuite() { folder_ = new TemporaryFolder("birkhoff_prepare_ranks"); }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  PrepareOnRanks() {
    const std::filesystem::path own = folder_->path() / GetParam().name;
    const bool is_new = std::filesystem::create_directory(own);
    std::filesystem::current_path(own);
    if (!is_new) return;
    make_input();
    expect_done(run_child(prepare("one", "")));
  }
  ~PrepareOnRanks() override { std::filesystem::current_path("/"); }

  static void make_input() {
    if (is_images()) {
      std::vector<Image> images;
      std::vector<std::int64_t> labels;
      for (int i = 0; i < 6000; ++i) {
        images.push_back(pattern(64, 64, 3, i));
        labels.push_back(i % 5);
      }
      write_bytes("in/a.npz", npz_of(images, labels, /*deflated=*/true));
      images.resize(1500);
      labels.resize(1500);
      write_bytes("in/b.npz", npz_of(images, labels));
      return;
    }
    std::mt19937 random(1);
    std::string text;
    while (text.size() < 12'000'000) {
      for (int i = 0; i < 20; ++i) text += fmt::format("{} ", random() % 2000 * (random() % 2000));
      text += "end.\n";
    }
    write_bytes("in/large.txt", text);
    for (int i = 0; i < 20; ++i)
      write_bytes(fmt::format("in/{}.txt", i), fmt::format("text {}\nof a small file\n", i));
  }

  static bool is_images() { return std::string(GetParam().name) == "Images"; }

  static Command prepare(const std::string& out, const std::string& options,
                         const std::string& input = "in") {
    return {.line = birkhoff_line(split_line(fmt::format(
                "prepare {} {} --out {} {}", GetParam().options, input, out, options)))};
  }
  static void expect_done(const Finished& finished) {
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_THAT(finished.out, HasSubstr(is_images() ? "image: " : "stream tokens: "));
  }
  // All files of a corpus, by name.
  static Tree content(const std::string& out) {
    Tree files;
    for (const auto& entry : std::filesystem::directory_iterator(out))
      files[entry.path().filename()] = read_bytes(entry.path());
    return files;
  }
  static void wait_for_file(const std::string& path) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(path)) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << path;
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(All, PrepareOnRanks,
                         testing::Values(Input{"Images", "--images --valid 0.2"},
                                         Input{"Text", "--tokenizer chars --valid 0.2 --test 0.1"},
                                         Input{"Lines", "--tokenizer words --lines --valid 0.2"}),
                         [](const auto& input) { return std::string(input.param.name); });

TEST_P(PrepareOnRanks, MakesTheSameBytes) {
  const Tree expected = content("one");
  EXPECT_GE(expected.size(), 4u);
  for (const char* ranks : {"2", "4"}) {
    const std::string out = std::string("ranks") + ranks;
    expect_done(run_child(prepare(out, std::string("--ranks ") + ranks)));
    EXPECT_TRUE(content(out) == expected) << ranks;
  }
  const Finished again = run_child(prepare("ranks2", "--ranks 3"));
  expect_done(again);
  EXPECT_THAT(again.err, HasSubstr("already prepared"));
}

TEST_P(PrepareOnRanks, ContinuesAfterAStop) {
  const Tree expected = content("one");
  // Rank 1 finishes its small shard of images when rank 0 is still at the beginning of its own.
  for (const std::string file : {".unfinished", ".finished-train-00001"}) {
    if (!is_images() && file != ".unfinished") continue;
    const std::string out = "stopped" + file;
    Child child(prepare(out, "--ranks 2"));
    wait_for_file(out + "/" + file);
    child.signal(SIGTERM);
    const Finished stopped = child.finish();
    EXPECT_EQ(stopped.code, 75) << stopped.err;
    EXPECT_THAT(stopped.err, HasSubstr("run the same command"));
    EXPECT_TRUE(std::filesystem::exists(out + "/" + file));
    expect_done(run_child(prepare(out, is_images() ? "" : "--ranks 3")));
    EXPECT_TRUE(content(out) == expected) << file;
  }
}

// kill -9 of all ranks or of one, with the processes that started them or without, at random
// moments; then the command runs again, on another number of ranks. BIRKHOFF_KILLS sets the number
// of kills.
TEST_P(PrepareOnRanks, KillsAtRandomMomentsChangeNothing) {
  const char* set = std::getenv("BIRKHOFF_KILLS");
  const int num_kills = set != nullptr ? std::atoi(set) : 3;
  const auto start = std::chrono::steady_clock::now();
  expect_done(run_child(prepare("undisturbed", "--ranks 2")));
  const auto duration =
      std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  const Tree expected = content("one");
  const std::string killed = std::filesystem::absolute("killed").string();
  std::mt19937 random(20);
  int num_killed = 0;
  for (int kill = 0; kill < num_kills; ++kill) {
    SCOPED_TRACE(fmt::format("kill {}", kill));
    Child child(prepare(killed, fmt::format("--ranks {}", 2 + kill % 2)));
    std::this_thread::sleep_for(milliseconds(random() % static_cast<unsigned>(duration.count())));
    std::vector<pid_t> victims = ranks_of(killed, "prepare");
    if (kill % 3 == 1 && !victims.empty()) victims = {victims[random() % victims.size()]};
    if (kill % 3 == 2) victims = processes_of(killed, "prepare");
    kill_all(victims);
    const Finished finished = child.finish();
    EXPECT_TRUE(wait_until_none(killed, std::chrono::seconds(20), "prepare"));
    if (victims.empty()) {
      EXPECT_EQ(finished.code, 0) << finished.err;
    }
    num_killed += finished.code != 0;
    if (finished.code != 0 && kill % 2 == 0) continue;  // killed again before it is done
    expect_done(run_child(prepare(killed, kill % 4 == 1 ? "" : "--ranks 3")));
    EXPECT_TRUE(content(killed) == expected);
    std::filesystem::remove_all(killed);
  }
  expect_done(run_child(prepare(killed, "--ranks 2")));
  EXPECT_TRUE(content(killed) == expected);
  // Kills before the ranks start, or after they end, hit nothing.
  EXPECT_GE(num_killed, num_kills / 4);
  fmt::print("{}: tried {} kills, lost {}, {} ended the command\n", GetParam().name, num_kills,
             HasFailure() ? "some" : "0", num_killed);
}

TEST_P(PrepareOnRanks, ArgumentsReachTheRanks) {
  write_bytes("0.2", "");
  write_bytes("0.1", "");
  std::filesystem::copy("in", "more");
  expect_done(run_child(prepare("plain", "more")));
  const Finished finished = run_child(prepare("noted", "--ranks 2 more"));
  expect_done(finished);
  EXPECT_TRUE(content("noted") == content("plain"));
  const std::string note = "--valid 0.2 is read as a fraction";
  const std::size_t first = finished.err.find(note);
  EXPECT_NE(first, std::string::npos) << finished.err;
  EXPECT_EQ(finished.err.find(note, first + 1), std::string::npos) << finished.err;
}

TEST_P(PrepareOnRanks, ReportsDamageInOneLine) {
  std::filesystem::copy("in", "damaged_in");
  std::string damage;
  if (is_images()) {
    const std::string npz = read_bytes("in/b.npz");
    write_bytes("damaged_in/b.npz", npz.substr(0, npz.size() / 2));
    damage = "damaged_in/b.npz: damaged npz";
  } else {
    std::string text = read_bytes("in/large.txt");
    text[text.size() / 2] = '\xff';
    write_bytes("damaged_in/large.txt", text);
    damage = "is not UTF-8";
  }
  const Finished finished = run_child(prepare("damaged", "--ranks 2", "damaged_in"));
  EXPECT_EQ(finished.code, 4) << finished.err;
  const std::size_t first = finished.err.find(damage);
  EXPECT_NE(first, std::string::npos) << finished.err;
  EXPECT_EQ(finished.err.find(damage, first + 1), std::string::npos) << finished.err;
}

TEST_P(PrepareOnRanks, RefusesStandardInputInOneLine) {
  const Finished finished = run_child(prepare("piped", "--ranks 2 -"));
  EXPECT_EQ(finished.code, 2) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr(is_images() ? "-: images cannot come through a pipe"
                                                  : "-: ranks cannot read a pipe"));
}

// Targets, too, reach the ranks, and a killed command starts over.
TEST(PreparePairsOnRanks, MakesTheSameBytesAlsoAfterAKill) {
  const TemporaryFolder folder("birkhoff_prepare_pairs");
  std::filesystem::current_path(folder.path());
  std::string sources, targets;
  for (int i = 0; i < 150'000; ++i) {
    sources += fmt::format("source {} of {}\n", i, i % 997);
    targets += fmt::format("Ziel {} von vielen, {}\n", i, i % 31);
  }
  write_bytes("a.en", sources);
  write_bytes("a.de", targets);
  write_bytes("b.en", "one more\nand another\n");
  write_bytes("b.de", "noch eins\nund noch eins\n");
  const auto prepare = [](const std::string& out, const std::string& options) {
    return Command{
        .line = birkhoff_line(split_line(fmt::format(
            "prepare --out {} {} --tokenizer words --source-tokenizer chars --train a.en "
            "--target a.de --valid 0.1 --test b.en --test-target b.de",
            out, options)))};
  };
  const auto content = [](const std::string& out) {
    Tree files;
    for (const auto& entry : std::filesystem::directory_iterator(out))
      files[entry.path().filename()] = read_bytes(entry.path());
    return files;
  };
  const Finished one = run_child(prepare("one", ""));
  ASSERT_EQ(one.code, 0) << one.err;
  const Tree expected = content("one");
  EXPECT_TRUE(expected.contains("source_tokenizer.chars"));
  const Finished two = run_child(prepare("two", "--ranks 2"));
  EXPECT_EQ(two.code, 0) << two.err;
  EXPECT_TRUE(content("two") == expected);
  const std::string killed = std::filesystem::absolute("killed").string();
  Child child(prepare(killed, "--ranks 2"));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!std::filesystem::exists(killed + "/.unfinished")) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(milliseconds(2));
  }
  kill_all(ranks_of(killed, "prepare"));
  EXPECT_NE(child.finish().code, 0);
  EXPECT_FALSE(std::filesystem::exists(killed + "/manifest.json"));
  const Finished again = run_child(prepare(killed, ""));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_TRUE(content(killed) == expected);
  std::filesystem::current_path("/");
}

}  // namespace
}  // namespace birkhoff
