// Features that cross a network between hosts: training, the loss of a host, the heartbeat's
// connection.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "hosts_fixture.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/run_history.h"
#include "tests/launcher/pipe_ends.h"

namespace birkhoff {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// The hosts of the run's newest job.
std::vector<std::string> hosts_of(const std::filesystem::path& run) {
  const std::vector<Job> jobs = read_history(RunPaths{run}.history());
  return jobs.empty() ? std::vector<std::string>() : jobs.back().start.hosts;
}

// Counted by its network interfaces, apart from the loopback.
double bytes_sent(const std::string& proc_net_dev) {
  double bytes = 0;
  std::istringstream lines(proc_net_dev);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.find("lo:") != std::string::npos) continue;
    std::istringstream columns(line.substr(colon + 1));
    double column = 0;
    for (int i = 0; i < 9; ++i) columns >> column;  // eight of receiving, then the bytes sent
    bytes += column;
  }
  return bytes;
}

TEST_F(Hosts, TwoRanksOnTwoHostsHaveTheBitsOfOneHost) {
  const Finished trained = run_child(on_host(1, train("two", {"--ranks", "2"})));
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(hosts_of(run("two")), ElementsAre("node1", "node2"));
  EXPECT_THAT(trained.err, Not(HasSubstr("unwatched")));
  expect_like_reference("two");
}

// Ranks of one host share memory in its /dev/shm. The other host's ranks do not see it.
TEST_F(Hosts, FourRanksOnTwoHostsHaveTheBitsOfOneHost) {
  const std::vector<std::string> options = {"--ranks", "4", "--set", "train.steps=60"};
  const Finished here = run_child(train("four_here", options));
  ASSERT_EQ(here.code, 0) << here.err;
  Child child(on_host(1, train("four", options), "hostfile4"));
  std::string shared;  // node2's files
  while (child.is_running()) {
    const std::string now = said_on_host(2, {"ls", "/dev/shm"});
    if (now.find("vader_segment.node2") != std::string::npos) shared = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const Finished trained = child.finish();
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(hosts_of(run("four")), ElementsAre("node1", "node2"));
  expect_like_reference("four", "four_here");
  EXPECT_NE(shared, "") << "ranks 2 and 3 share memory";
  EXPECT_THAT(shared, Not(HasSubstr("node1")));
  for (const int host : {1, 2}) {
    EXPECT_EQ(said_on_host(host, {"ls", "/dev/shm"}), "") << "nothing is left on node" << host;
  }
}

// With mesh.ranks_per_node a host of two ranks sends its sums once instead of twice.
TEST_F(Hosts, InNodesEachHostSendsItsSumsOnce) {
  std::map<std::string, double> sent;
  for (const std::string ranks_per_node : {"0", "2"}) {
    SCOPED_TRACE(ranks_per_node);
    const std::string name = "nodes_of_" + ranks_per_node;
    const std::vector<std::string> options = {"--ranks", "4",
                                              "--set",   "train.steps=60",
                                              "--set",   "checkpoint.every=0",
                                              "--set",   "mesh.ranks_per_node=" + ranks_per_node};
    const double before = bytes_sent(said_on_host(1, {"cat", "/proc/net/dev"}));
    const Finished trained = run_child(on_host(1, train(name, options), "hostfile4"));
    sent[ranks_per_node] = bytes_sent(said_on_host(1, {"cat", "/proc/net/dev"})) - before;
    ASSERT_EQ(trained.code, 0) << trained.err;
    const bool advised = trained.err.find("set mesh.ranks_per_node: 2") != std::string::npos;
    EXPECT_EQ(advised, ranks_per_node == "0") << trained.err;
    const Finished here = run_child(train(name + "_here", options));
    ASSERT_EQ(here.code, 0) << here.err;
    expect_like_reference(name, name + "_here");
  }
  std::cout << "bytes sent by a host: " << sent["0"] << " at one level, " << sent["2"]
            << " in nodes\n";
  EXPECT_LT(sent["2"], 0.6 * sent["0"]);
}

TEST_F(Hosts, ALostHostIsNamedAndTheRunResumesWithTheSameBits) {
  constexpr double kLimit = 1.5, kEnd = 5;  // kEnd: to end mpirun, which waits for the lost host
  const std::vector<std::string> options = {"--ranks", "2",
                                            "--set",   "watchdog.seconds=1.5",
                                            "--set",   "data.prefetch=1",
                                            "--set",   "checkpoint.every=10"};
  Command command = on_host(1, train("lost", options));
  const Command again = command;
  for (const auto& [name, value] :
       {std::pair("LD_PRELOAD", SLOW_READS), std::pair("BIRKHOFF_SLOW_READS", "20")}) {
    command.environment.emplace_back(name, value);
  }
  Child child(command);
  ASSERT_TRUE(wait_for_step(child, run("lost"), 25)) << child.finish(seconds(1)).err;
  const auto start = std::chrono::steady_clock::now();
  cluster("cut", {"2"});
  const Finished finished = child.finish(seconds(60));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(finished.code, 8) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("birkhoff: rank 1 on node2 has been silent for"),
                                  HasSubstr("its machine or network is down"),
                                  HasSubstr("rank 0 waits for it in step ")));
  EXPECT_LT(taken.count(), kLimit + kEnd);
  EXPECT_TRUE(wait_until_none(run("lost"), seconds(10))) << "the lost host's rank ends by itself";
  EXPECT_THAT(read_bytes(RunPaths{run("lost")}.log(1).string()),
              HasSubstr("rank 0 on node1 has been silent for"));
  const int step = last_step(run("lost"));
  EXPECT_LT(step, kSteps);

  cluster("join", {"2"});
  const Finished resumed = run_child(again);
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("resumes at step "));
  EXPECT_THAT(hosts_of(run("lost")), ElementsAre("node1", "node2"));
  expect_like_reference("lost");
  std::cout << "lost host: " << taken.count() << " s from the cut to the job's end\n";
}

TEST_F(Hosts, DoctorNamesAHostThatCannotReachTheHeartbeat) {
  const nlohmann::json open = examined();
  EXPECT_EQ(open.at("verdict"), "pass") << open.dump(2);
  const Firewall firewall;
  expect_blocked(examined());
}

// All hosts have the address of loopback. There another program listens, on all ports that rank 0
// may get. One of them may still be in use by a program that is ending.
TEST_F(Hosts, DoctorIsNotDeceivedByAnotherProgram) {
  constexpr const char* kImpostor = R"(
import selectors, socket, time
listening = selectors.DefaultSelector()
for port in range(40000, 40100):
    while True:
        try:
            listening.register(socket.create_server(("127.0.0.1", port)), selectors.EVENT_READ)
            break
        except OSError:
            time.sleep(0.1)
print("listens", flush=True)
while True:
    for key, _ in listening.select():
        key.fileobj.accept()[0].sendall(b"welcome" * 10)
)";
  const std::string ports = "/proc/sys/net/ipv4/ip_local_port_range";
  const Firewall firewall;
  said_on_host(2, {"sh", "-c", "echo 32768 39999 > " + ports});
  Command command = on_host(2, {.line = {"python3", "-c", kImpostor}});
  command.output = "impostor.out";
  Child impostor(command);
  const auto said = [] {
    return std::filesystem::exists("impostor.out") && !read_bytes("impostor.out").empty();
  };
  // On a busy machine, mpirun's daemons of the test before may take more than 10 s to end.
  for (int wait = 0; wait < 3000 && !said(); ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_TRUE(said()) << impostor.finish(seconds(0)).err;
  said_on_host(1, {"sh", "-c", "echo 40000 40099 > " + ports});
  expect_blocked(examined());
  for (const int host : {1, 2}) {
    said_on_host(host, {"sh", "-c", "echo 32768 60999 > " + ports});
  }
  EXPECT_TRUE(impostor.is_running()) << impostor.finish().err;
}

TEST_F(Hosts, ARankThatCannotReachTheHeartbeatSaysThatItTrainsUnwatched) {
  const Firewall firewall;
  // As many steps as it takes to give up connecting.
  Child child(on_host(1, train("unwatched", {"--ranks", "2", "--set", "train.steps=1000000"})));
  const std::string log = RunPaths{run("unwatched")}.log(1).string();
  const std::string warning = "rank 1 warning: the watchdog cannot be reached";
  EXPECT_TRUE(wait_until([&] {
    return !child.is_running() ||
           (std::filesystem::exists(log) && read_bytes(log).find(warning) != std::string::npos);
  })) << "no warning in "
      << log;
  signal_rank(run("unwatched"), 0, SIGTERM);
  const Finished trained = child.finish();
  EXPECT_EQ(trained.code, 75) << trained.err;
  EXPECT_THAT(trained.err, HasSubstr(warning));
}

// The laboratory's links: 2 ms, and 12.5 MB/s in each direction.
TEST_F(Hosts, LinksHaveTheLatencyAndTheRateThatTheyAreGiven) {
  if (!std::filesystem::exists("/dev/net/tun")) GTEST_SKIP() << "needs /dev/net/tun";
  const std::string slow = (folder_->path() / "slow").string();
  const Finished started = run_child({.line = {HOST_CLUSTER, "start", slow, "2", "2000"}});
  ASSERT_EQ(started.code, 0) << started.err;
  EXPECT_EQ(run_child({.line = {HOST_CLUSTER, "shape", slow, "100mbit"}}).code, 0);
  const auto microseconds = [&](const std::string& bytes) {
    Command bench = on_host(1, {.line = birkhoff_line({"bench", "comm", "--ranks", "2", "--rounds",
                                                       "1", "--bytes", bytes + "-" + bytes})});
    bench.line[2] = slow;
    const Finished finished = run_child(bench);
    EXPECT_EQ(finished.code, 0) << finished.err;
    return std::stod(finished.out.substr(finished.out.find("| all_reduce | " + bytes) +
                                         std::string("| all_reduce |  | ").size() + bytes.size()));
  };
  const double latency = microseconds("64");
  EXPECT_GT(latency, 2000);
  EXPECT_LT(latency, 6000);
  // Two phases of half a tensor.
  const double two_phases = 1048576 / 12.5;
  EXPECT_GT(microseconds("1048576"), 0.9 * two_phases);
  EXPECT_EQ(run_child({.line = {HOST_CLUSTER, "stop", slow}}).code, 0);
}

}  // namespace
}  // namespace birkhoff
