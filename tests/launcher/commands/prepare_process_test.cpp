// `birkhoff prepare --images` on ranks: the same bytes as one process, and continued after a stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <thread>

#include "tests/data/images/image_files.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

class PrepareOnRanks : public testing::Test {
 protected:
  PrepareOnRanks() {
    std::filesystem::current_path(folder_.path());
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
  }
  ~PrepareOnRanks() override { std::filesystem::current_path("/"); }

  static Command prepare(const std::string& out, const std::string& options) {
    return {.line = birkhoff_line(
                split_line("prepare --images --valid 0.2 in --out " + out + " " + options))};
  }
  static void expect_done(const Finished& finished) {
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_THAT(finished.out, HasSubstr("image: "));
  }
  // All files of a corpus, by name.
  static Tree content(const std::string& out) {
    Tree files;
    for (const auto& entry : std::filesystem::directory_iterator(out))
      files[entry.path().filename()] = read_bytes(entry.path());
    return files;
  }

  TemporaryFolder folder_{"birkhoff_prepare_ranks"};
};

TEST_F(PrepareOnRanks, MakesTheSameBytes) {
  expect_done(run_child(prepare("one", "")));
  const Tree expected = content("one");
  EXPECT_GE(expected.size(), 5u);
  for (const char* ranks : {"2", "4"}) {
    const std::string out = std::string("ranks") + ranks;
    expect_done(run_child(prepare(out, std::string("--ranks ") + ranks)));
    EXPECT_EQ(content(out), expected) << ranks;
  }
  const Finished again = run_child(prepare("ranks2", "--ranks 3"));
  expect_done(again);
  EXPECT_THAT(again.err, HasSubstr("already prepared"));
}

TEST_F(PrepareOnRanks, ContinuesAfterAStop) {
  expect_done(run_child(prepare("one", "")));
  const Tree expected = content("one");
  for (const int milliseconds : {600, 1000, 1500}) {
    const std::string out = "stopped" + std::to_string(milliseconds);
    Child child(prepare(out, "--ranks 2"));
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    child.signal(SIGTERM);
    const Finished stopped = child.finish();
    EXPECT_THAT(stopped.code, testing::AnyOf(0, 75)) << stopped.err;
    expect_done(run_child(prepare(out, milliseconds == 1000 ? "" : "--ranks 3")));
    EXPECT_EQ(content(out), expected) << milliseconds;
  }
}

TEST_F(PrepareOnRanks, ReportsDamageInOneLine) {
  const std::string npz = read_bytes("in/b.npz");
  write_bytes("in/b.npz", npz.substr(0, npz.size() / 2));
  const Finished finished = run_child(prepare("damaged", "--ranks 2"));
  EXPECT_EQ(finished.code, 4) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("in/b.npz: damaged npz"));
}

}  // namespace
}  // namespace birkhoff
