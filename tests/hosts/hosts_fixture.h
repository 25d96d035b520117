// Runs of the real program on two hosts, which host_cluster makes on this machine. Needs root that
// may make namespaces, and iproute2; skipped, by name, without them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/launcher/train_process_fixture.h"

namespace birkhoff {

class Hosts : public TrainProcess {
 protected:
  // Open MPI's own ports, which a firewall between hosts lets pass; the heartbeat's is another.
  static constexpr const char *kPortsOfLauncher = "10000-10999", *kFirstPortOfRanks = "11000",
                              *kOtherPorts = "32768-60999";

  static void SetUpTestSuite() {
    const Finished possible = run_child({.line = {HOST_CLUSTER, "possible"}});
    why_not_ = possible.err;
    if (possible.code != 0) return;
    TrainProcess::SetUpTestSuite();
    hosts_ = (folder_->path() / "hosts").string();
    const Finished started = run_child({.line = {HOST_CLUSTER, "start", hosts_, "2"}});
    ASSERT_EQ(started.code, 0) << started.err;
    write_bytes("hostfile", "node1 slots=1\nnode2 slots=1\n");
    write_bytes("hostfile4", "node1 slots=2\nnode2 slots=2\n");
  }
  static void TearDownTestSuite() {
    if (folder_ == nullptr) return;
    run_child({.line = {HOST_CLUSTER, "stop", hosts_}});
    TrainProcess::TearDownTestSuite();
    folder_ = nullptr;
  }

  void SetUp() override {
    if (folder_ == nullptr) GTEST_SKIP() << why_not_;
  }
  void TearDown() override {
    if (folder_ != nullptr) TrainProcess::TearDown();
  }

  // Runs host_cluster COMMAND.
  static void cluster(const std::string& command, const std::vector<std::string>& arguments) {
    std::vector<std::string> line = {HOST_CLUSTER, command, hosts_};
    line.insert(line.end(), arguments.begin(), arguments.end());
    const Finished done = run_child({.line = line});
    EXPECT_EQ(done.code, 0) << done.err;
  }

  // The same command on a host. mpirun starts its ranks on the hosts of the file.
  static Command on_host(int host, Command command, const std::string& file = "hostfile") {
    command.line.insert(command.line.begin(), {HOST_CLUSTER, "run", hosts_, std::to_string(host)});
    command.environment.emplace_back("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.environment.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.environment.emplace_back("OMPI_MCA_orte_default_hostfile", run(file).string());
    command.environment.emplace_back("OMPI_MCA_oob_tcp_dynamic_ipv4_ports", kPortsOfLauncher);
    command.environment.emplace_back("OMPI_MCA_btl_tcp_port_min_v4", kFirstPortOfRanks);
    return command;
  }

  // What the command prints on a host.
  static std::string said_on_host(int host, const std::vector<std::string>& line) {
    return run_child(on_host(host, {.line = line})).out;
  }

  static inline std::string hosts_, why_not_;
};

}  // namespace birkhoff
