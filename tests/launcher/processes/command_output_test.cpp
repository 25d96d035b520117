// Small programs that run at the same time, and their output.
#include "launcher/processes/command_output.h"

#include <gtest/gtest.h>
#include <pthread.h>

namespace birkhoff {
namespace {

using std::chrono::milliseconds;

TEST(CommandOutput, HasCodeAndBothOutputs) {
  const CommandOutput output =
      output_of({"sh", "-c", "echo to out; echo to err >&2; exit 3"}, std::chrono::seconds(30));
  EXPECT_EQ(output.code, 3);
  EXPECT_EQ(output.out, "to out\n");
  EXPECT_EQ(output.err, "to err\n");
  EXPECT_EQ(output_of({"/no/such/program"}, std::chrono::seconds(30)).code, 127);
  EXPECT_EQ(output_of({"sh", "-c", "kill -9 $$"}, std::chrono::seconds(30)).code, 128 + 9);
}

// Ranks run programs, too, and a fork may corrupt memory that MPI has registered.
TEST(CommandOutput, TheProcessDoesNotFork) {
  static int forks = 0;
  ASSERT_EQ(pthread_atfork([] { ++forks; }, nullptr, nullptr), 0);
  EXPECT_EQ(output_of({"echo", "spawned"}, std::chrono::seconds(30)).out, "spawned\n");
  EXPECT_EQ(forks, 0);
}

// A node that does not answer must not make those after it look lost.
TEST(CommandOutput, OneThatIsTooSlowHidesNoOther) {
  const std::vector<CommandOutput> outputs =
      outputs_of({{"echo", "first"}, {"sleep", "60"}, {"echo", "last"}}, milliseconds(1500));
  ASSERT_EQ(outputs.size(), 3u);
  EXPECT_EQ(outputs[0].code, 0);
  EXPECT_EQ(outputs[1].code, -1);
  EXPECT_EQ(outputs[2].code, 0);
  EXPECT_EQ(outputs[2].out, "last\n");
}

// A lost node delays a restart no longer than it takes to find enough others.
TEST(CommandOutput, OnceEnoughHavePrintedTheOthersGetTwoSeconds) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<CommandOutput> outputs = outputs_of(
      {{"sleep", "60"}, {"echo", "first"}, {"sh", "-c", "sleep 1; echo second"}, {"true"}},
      std::chrono::seconds(30), /*wanted=*/1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(outputs[0].code, -1);
  EXPECT_EQ(outputs[1].out, "first\n");
  EXPECT_EQ(outputs[2].out, "second\n");
  EXPECT_EQ(outputs[3].code, 0);
}

}  // namespace
}  // namespace birkhoff
