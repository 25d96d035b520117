#include "cluster/mpi_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "cluster/base/error.h"
#include "tests/cluster/group_conformance.h"
#include "tests/cluster/mpi_test_main.h"

namespace birkhoff {
namespace {

double cpu_seconds() {
  rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(World, KnowsRanksAndMachine) {
  World& world = test_world();
  EXPECT_EQ(world.size(), announced_ranks());
  EXPECT_EQ(world.rank(), announced_rank());
  EXPECT_EQ(world.local_size(), world.size());  // tests run on one machine
  EXPECT_EQ(world.local_rank(), world.rank());
  EXPECT_FALSE(world.host().empty());
  EXPECT_THROW(World(), Error);
}

TEST(World, ChecksWhatTheLauncherAnnounced) {
  EXPECT_NO_THROW(check_world_size(1, 1));
  EXPECT_NO_THROW(check_world_size(4, 4));
  EXPECT_NO_THROW(check_world_size(4, 1));
  try {
    check_world_size(1, 4);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), testing::HasSubstr("announces 4 ranks but MPI sees 1"));
    EXPECT_THAT(error.what(), testing::HasSubstr("srun --mpi=pmix"));
  }
}

TEST(World, ReadsTheAnnouncementOfEveryLauncher) {
  const std::vector<const char*> names{
      "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE",    "PMI_RANK", "PMIX_RANK",
      "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID",        "SLURM_PROCID"};
  std::vector<std::pair<const char*, std::string>> saved;
  for (const char* name : names) {
    if (const char* value = std::getenv(name)) saved.emplace_back(name, value);
    ::unsetenv(name);
  }
  EXPECT_EQ(announced_ranks(), 1);
  EXPECT_EQ(announced_rank(), 0);
  ::setenv("SLURM_STEP_NUM_TASKS", "8", 1);
  ::setenv("SLURM_PROCID", "5", 1);
  EXPECT_EQ(announced_ranks(), 8);
  EXPECT_EQ(announced_rank(), 5);
  // mpirun inside a Slurm step counts its own ranks.
  ::setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  ::setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  EXPECT_EQ(announced_ranks(), 2);
  EXPECT_EQ(announced_rank(), 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "two", 1);
  EXPECT_EQ(announced_ranks(), 8);
  ::setenv("SLURM_STEP_ID", "4294967290", 1);  // the shell of salloc: no task
  EXPECT_EQ(announced_ranks(), 1);
  for (const char* name : names) ::unsetenv(name);
  for (const auto& [name, value] : saved) ::setenv(name, value.c_str(), 1);
}

TEST(MpiGroup, Conforms) {
  ProcessGroup& group = test_world().group();
  check_operations(group);
  check_bytes(group);
  check_overlap(group);
  check_ring(group);
  check_misuse(group);
}

TEST(MpiGroup, ConformsInTwoLevels) {
  World& world = test_world();
  for (int node_ranks = 1; node_ranks <= world.size(); ++node_ranks) {
    if (world.size() % node_ranks != 0) continue;
    SCOPED_TRACE(node_ranks);
    const auto group = world.split(0, world.rank(), node_ranks);
    check_operations(*group, node_ranks);
    check_overlap(*group);
  }
}

// With n nodes, each sends 2 (n - 1) / n of an all-reduced tensor, half of it in each of a
// reduce-scatter and an all-gather, however many ranks it has.
TEST(MpiGroup, EachNodeSendsItsSumsOnce) {
  World& world = test_world();
  constexpr std::int64_t kElements = 240000, kBytes = kElements * 4;
  for (int node_ranks = 1; node_ranks <= world.size(); ++node_ranks) {
    if (world.size() % node_ranks != 0) continue;
    SCOPED_TRACE(node_ranks);
    const auto group = world.split(0, world.rank(), node_ranks);
    const std::int64_t nodes = world.size() / node_ranks, half = kBytes / nodes * (nodes - 1);
    // Of all nodes, since the last call.
    std::int64_t before = 0;
    const auto sent = [&] {
      const std::int64_t mine = dynamic_cast<MpiGroup&>(*group).bytes_between_nodes();
      const at::Tensor sum = at::full({1}, mine - std::exchange(before, mine), at::kLong);
      world.group().all_reduce(sum, ReduceOp::kSum, "sent");
      return sum.item<std::int64_t>();
    };
    const at::Tensor x = at::ones({kElements});
    const at::Tensor mine = x.slice(0, 0, kElements / world.size()).clone();
    group->all_reduce(x, ReduceOp::kSum, "test");
    EXPECT_EQ(sent(), nodes * 2 * half);
    group->reduce_scatter(mine, x, ReduceOp::kSum, "test");
    EXPECT_EQ(sent(), nodes * half);
    group->all_gather(x, mine, "test");
    EXPECT_EQ(sent(), nodes * half);
  }
}

TEST(MpiGroup, TensorsOfManyPieces) {
  ProcessGroup& group = test_world().group();
  at::Tensor x = at::arange(1500000, at::kDouble) + group.rank();  // 12 MB
  const at::Tensor sum =
      at::arange(1500000, at::kDouble) * group.size() + group.size() * (group.size() - 1) / 2.0;
  group.all_reduce(x, ReduceOp::kSum, "large");
  EXPECT_TRUE(at::equal(x, sum));
}

TEST(MpiGroup, SplitGroupsWorkSideBySide) {
  World& world = test_world();
  // Even and odd ranks, in reverse order.
  const std::unique_ptr<ProcessGroup> part = world.split(world.rank() % 2, -world.rank());
  const int last_of_color = (world.size() - 1) / 2 * 2 + world.rank() % 2;
  const int top = last_of_color < world.size() ? last_of_color : last_of_color - 2;
  EXPECT_EQ(part->size(), (world.size() + 1 - world.rank() % 2) / 2);
  EXPECT_EQ(part->rank(), (top - world.rank()) / 2);
  at::Tensor mine = at::full({50001}, world.rank(), at::kFloat);
  at::Tensor everybodys = at::full({50001}, world.rank(), at::kFloat);
  const auto first = part->all_reduce_async(mine, ReduceOp::kSum, "part");
  const auto second = world.group().all_reduce_async(everybodys, ReduceOp::kSum, "world");
  second->wait();
  first->wait();
  double expected = 0;
  for (int r = world.rank() % 2; r < world.size(); r += 2) expected += r;
  EXPECT_EQ(mine[50000].item<double>(), expected);
  EXPECT_EQ(everybodys[0].item<double>(), world.size() * (world.size() - 1) / 2);
  check_operations(*part);
}

// Whether this thread got its core back from each yield of a millisecond at once.
bool has_a_core_for_itself() {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  Clock::duration longest{};
  for (auto now = start; now - start < std::chrono::milliseconds(1);) {
    ::sched_yield();
    const auto after = Clock::now();
    longest = std::max(longest, after - now);
    now = after;
  }
  return longest < std::chrono::microseconds(100);
}

// Where no other thread computes, a wait of 20 ms keeps its core. (A core that sleeps is slow
// afterwards on virtual machines.)
TEST(MpiGroup, ShortWaitsKeepTheCore) {
  World& world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank waits for nobody";
  if (world.size() > static_cast<int>(std::thread::hardware_concurrency())) {
    GTEST_SKIP() << "ranks share cores";
  }
  at::Tensor x = at::ones({1000});
  int num_quiet = 0;
  double largest_share = 0;  // of CPU time
  for (int round = 0; round < 30; ++round) {
    const bool quiet = has_a_core_for_itself();
    world.group().barrier("together");
    const double cpu_before = cpu_seconds();
    const auto start = std::chrono::steady_clock::now();
    if (world.rank() == world.size() - 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    world.group().all_reduce(x, ReduceOp::kSum, "late");
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    num_quiet += quiet;
    largest_share = std::max(largest_share, (cpu_seconds() - cpu_before) / waited.count());
  }
  if (world.rank() == world.size() - 1) return;  // the others wait for it
  if (num_quiet <= 10) GTEST_SKIP() << "other threads use this rank's core";
  EXPECT_GT(largest_share, 0.5);
}

// A waiting thread yields its core for at most 50 ms, then it sleeps.
TEST(MpiGroup, WaitingSleeps) {
  World& world = test_world();
  at::Tensor x = at::ones({1000});  // so few that their sum takes no time
  double least_share = 1;           // of CPU time; a virtual CPU that stands still counts as busy
  for (int round = 0; round < 3; ++round) {
    world.group().barrier("together");
    const double cpu_before = cpu_seconds(), counted_before = waited_seconds();
    const auto start = std::chrono::steady_clock::now();
    if (world.rank() == world.size() - 1) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    world.group().all_reduce(x, ReduceOp::kSum, "late");
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    EXPECT_GE(waited.count(), 0.99);
    least_share = std::min(least_share, (cpu_seconds() - cpu_before - 0.05) / waited.count());
    const double counted = waited_seconds() - counted_before;
    EXPECT_LE(counted, waited.count());
    if (world.rank() != world.size() - 1) {
      EXPECT_GE(counted, 0.9);  // of the 1 s; this rank may have come late
    }
  }
  // A spinning wait would use CPU time all the while.
  EXPECT_LT(least_share, 0.1);
}

}  // namespace
}  // namespace birkhoff
