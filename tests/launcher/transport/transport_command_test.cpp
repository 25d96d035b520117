// `birkhoff transport` in the test's own process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "cluster/base/files/file.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"
#include "tests/launcher/said.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class TransportCommand : public testing::Test {
 protected:
  void SetUp() override { fs::current_path(folder_.path()); }
  void TearDown() override { fs::current_path("/"); }

  static std::vector<double> numbers(const std::string& text) {
    std::istringstream in(text);
    return {std::istream_iterator<double>(in), {}};
  }

  TemporaryFolder folder_{"birkhoff_transport"};
};

TEST_F(TransportCommand, TheFactoriesHaveThePublishedCost) {
  const Said said = birkhoff_says(
      {"transport", "--example", "factories", "--tolerance", "1e-4", "--svg", "errors.svg"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(said.err, "");
  EXPECT_THAT(said.out, AllOf(HasSubstr("cost        0.949787\n"), HasSubstr("iterations  364\n"),
                              HasSubstr("errors      8.03e-05 of the source sums")));
  EXPECT_THAT(read_file("errors.svg", 1 << 20),
              AllOf(HasSubstr("polyline"), HasSubstr("share of the total mass")));
}

TEST_F(TransportCommand, ASmallRegularizationGivesAPermutation) {
  const Said said = birkhoff_says({"transport", "--example", "assignment", "--reg", "0.001",
                                   "--eps-scaling", "--plan", "plan.tsv"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.out, HasSubstr("cost        1.7800"));
  const std::vector<double> plan = numbers(read_file("plan.tsv", 1 << 20));
  ASSERT_EQ(plan.size(), 25u);
  const std::vector<std::size_t> target_of = {3, 2, 1, 0, 4};
  for (std::size_t i = 0; i < plan.size(); ++i) {
    EXPECT_NEAR(plan[i], i % 5 == target_of[i / 5] ? 1 : 0, 1e-3) << i;
  }
}

TEST_F(TransportCommand, SortingMovesValuesToTheirPositions) {
  write_bytes("values", "3\n1\n2.5\n-1\n7\n4.2\n");
  const Said soft = birkhoff_says({"transport", "--sort", "values", "--reg", "0.1"});
  EXPECT_THAT(soft.out, HasSubstr("sorted      -0.0356703 1.08346 "));
  const Said sharp =
      birkhoff_says({"transport", "--sort", "values", "--reg", "0.002", "--tolerance", "1e-4"});
  EXPECT_EQ(sharp.code, 0) << sharp.err;
  const std::size_t begin = sharp.out.find("sorted") + 6;
  const std::vector<double> sorted =
      numbers(sharp.out.substr(begin, sharp.out.find('\n', begin) - begin));
  const std::vector<double> expected = {-1, 1, 2.5, 3, 4.2, 7};
  ASSERT_EQ(sorted.size(), expected.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) EXPECT_NEAR(sorted[i], expected[i], 0.02);
}

TEST_F(TransportCommand, FilesMaySeparateNumbersByCommasTabsOrSpaces) {
  write_bytes("cost.csv", "0, 1,5\r\n4 ,6 ,1\r\n\r\n");
  write_bytes("cost.tsv", "0\t1\t5\n4\t6\t1");
  write_bytes("cost.txt", "  0  1 5 \n4 6    1\n");
  write_bytes("supply", "2\n1\n");
  write_bytes("demand", "1 1 1\n");
  std::string first;
  for (const std::string cost : {"cost.csv", "cost.tsv", "cost.txt"}) {
    const Said said = birkhoff_says({"transport", "--cost", cost, "--source", "supply", "--target",
                                     "demand", "--reg", "0.05", "--eps-scaling"});
    EXPECT_EQ(said.code, 0) << said.err;
    EXPECT_THAT(said.out, HasSubstr("cost        2.000000\n")) << cost;
    if (first.empty()) first = said.out;
    EXPECT_EQ(said.out, first) << cost;
  }
}

TEST_F(TransportCommand, PointsCostTheirDistances) {
  write_bytes("a", "0 0\n3 4\n");
  write_bytes("b", "0 0\n3 4\n0 5\n");
  write_bytes("supply", "2\n1\n");
  write_bytes("demand", "1\n1\n1\n");
  const std::vector<std::string> line = {"transport", "--from",   "a",      "--to",
                                         "b",         "--source", "supply", "--target",
                                         "demand",    "--reg",    "0.01",   "--eps-scaling"};
  EXPECT_THAT(birkhoff_says(line).out, HasSubstr("cost        5.000000\n"));
  std::vector<std::string> squared = line;
  squared.emplace_back("--squared");
  EXPECT_THAT(birkhoff_says(squared).out, HasSubstr("cost        25.000000\n"));
}

TEST_F(TransportCommand, TheLimitOfIterationsEndsWith9AfterThePlan) {
  const Said said = birkhoff_says(
      {"transport", "--example", "factories", "--iterations", "10", "--plan", "plan.tsv"});
  EXPECT_EQ(said.code, 9);
  EXPECT_THAT(said.out, HasSubstr("iterations  10\n"));
  EXPECT_THAT(said.err,
              AllOf(HasSubstr("stopped after 10 iterations"), HasSubstr("--eps-scaling")));
  EXPECT_EQ(numbers(read_file("plan.tsv", 1 << 20)).size(), 25u);
}

}  // namespace
}  // namespace birkhoff
