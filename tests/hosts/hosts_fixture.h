// Runs of the real program on two hosts, which host_cluster makes on this machine. Needs root that
// may make namespaces, and iproute2; skipped, by name, without them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/launcher/processes/train_process_fixture.h"

namespace birkhoff {

class Hosts : public TrainProcess {
 protected:
  // Ports of Open MPI, and those that the system chooses: one of them is the heartbeat's.
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

  // A firewall between the hosts that lets only MPI's ports pass, from host 2 to host 1.
  struct Firewall {
    Firewall() { cluster("block", {"2", "1", kOtherPorts}); }
    ~Firewall() { cluster("unblock", {"2", "1", kOtherPorts}); }
  };

  // The check of the network, by two ranks on two hosts. Expects that doctor ends with 0.
  static nlohmann::json examined() {
    const Command doctor = {.line = birkhoff_line({"doctor", "tiny.txtpb", "--ranks", "2",
                                                   "--no-speed", "--json", "report.json"})};
    const Finished finished = run_child(on_host(1, doctor));
    EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
    EXPECT_THAT(finished.out, testing::HasSubstr("2 hosts: node1, node2"));
    EXPECT_THAT(finished.err, testing::Not(testing::HasSubstr("rank 0 warning")));
    std::ifstream file("report.json");
    const nlohmann::json report = nlohmann::json::parse(file);
    for (const nlohmann::json& check : report.at("checks")) {
      if (check.at("check") == "network") return check;
    }
    return {};
  }

  static void expect_blocked(const nlohmann::json& network) {
    EXPECT_EQ(network.at("verdict"), "warn") << network.dump(2);
    ASSERT_EQ(network.at("findings").size(), 1u) << network.dump(2);
    const nlohmann::json& finding = network.at("findings").at(0);
    EXPECT_EQ(finding.at("host"), "node2");
    EXPECT_EQ(finding.at("ranks"), nlohmann::json({1}));
    EXPECT_THAT(finding.at("found").get<std::string>(),
                testing::HasSubstr("no TCP connection to rank 0 on node1"));
  }

  static inline std::string hosts_, why_not_;
};

}  // namespace birkhoff
