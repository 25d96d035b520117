// Worlds of ranks with real faults, most of them made by a preloaded library (rank_faults.cpp): the
// doctor finds each and names its host and ranks. docs/doctor.md lists them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/training.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kHosts = "0:host=node0 1:host=node1 2:host=node2 3:host=node3";

class DoctorProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_doctor");
    fs::current_path(folder_->path());
    write_bytes("text.txt", some_text(6000, 1));
    write_bytes("tiny.txtpb", tiny_training());
    const Finished prepared =
        run_child({.line = birkhoff_line({"prepare", "--out", "corpus", "--tokenizer", "chars",
                                          "--valid", "0.2", "text.txt"})});
    ASSERT_EQ(prepared.code, 0) << prepared.err;
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  // The program with these arguments on ranks with these faults. One thread a rank, unless
  // `environment` says otherwise.
  static Command with_faults(const std::vector<std::string>& arguments, const std::string& faults,
                             const Environment& environment = {}) {
    Command command = {.line = birkhoff_line(arguments),
                       .environment = {{"OMP_NUM_THREADS", "1"},
                                       {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                       {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                       {"LD_PRELOAD", RANK_FAULTS},
                                       {"RANK_FAULTS", faults}}};
    command.environment.insert(command.environment.end(), environment.begin(), environment.end());
    return command;
  }

  // The report of four ranks, named node0 to node3, without speeds unless asked for. Expects exit
  // code `code`.
  static json examined(const std::string& faults, int code, const Environment& environment = {},
                       const std::vector<std::string>& more = {"--no-speed"}) {
    std::vector<std::string> arguments = {"doctor",  "tiny.txtpb", "--run",  "run/new",
                                          "--ranks", "4",          "--json", "report.json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished =
        run_child(with_faults(arguments, std::string(kHosts) + " " + faults, environment));
    EXPECT_EQ(finished.code, code) << finished.out << finished.err;
    return report(finished);
  }

  // The file report.json, which is removed.
  static json report(const Finished& finished) {
    std::ifstream file("report.json");
    const json report = json::parse(file, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(report.is_discarded()) << finished.out << finished.err;
    fs::remove("report.json");
    return report;
  }

  static json findings(const json& report, const std::string& check) {
    for (const json& examined : report.at("checks")) {
      if (examined.at("check") == check) return examined.at("findings");
    }
    return json::array();
  }

  // Expects a finding of the check, on this host, that says `found`. Returns all that it says.
  static std::string expect_found(const json& report, const std::string& check,
                                  const std::string& verdict, const std::string& host,
                                  const std::vector<int>& ranks, const std::string& found) {
    for (const json& finding : findings(report, check)) {
      const std::string text = finding.at("found");
      if (finding.at("verdict") == verdict && finding.at("host") == host &&
          finding.at("ranks") == ranks && text.find(found) != std::string::npos) {
        return text;
      }
    }
    ADD_FAILURE() << check << " does not find '" << found << "' on " << host << ":\n"
                  << report.dump(2);
    return "";
  }

  static std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(DoctorProcess, AHealthyWorldPassesWithinAMinuteAndLeavesNothing) {
  const std::vector<std::string> before = names_in(".");
  const Finished finished =
      run_child(with_faults({"doctor", "tiny.txtpb", "--run", "run/new", "--ranks", "4", "--json",
                             "report.json", "--exclude-file", "bad"},
                            ""),
                seconds(60));
  EXPECT_THAT(finished.out,
              AllOf(HasSubstr("corpus"), HasSubstr("4 ranks on 1 host, examined in")));
  const json found = report(finished);
  EXPECT_EQ(found.at("checks").size(), 16u) << "all checks";
  // If this machine is busy with other processes, they make ranks slow, and the doctor says that a
  // rank had no CPU.
  const bool busy = found.dump().find("it had a CPU for") != std::string::npos;
  for (const json& check : found.at("checks")) {
    const std::string name = check.at("check");
    if (name.ends_with("speed")) {
      EXPECT_TRUE(busy || check.at("verdict") != "fail") << check.dump(2);
    } else if (name != "threads") {  // four ranks may share the cores of this machine
      EXPECT_EQ(check.at("verdict"), "pass") << check.dump(2);
    }
  }
  EXPECT_EQ(finished.code, found.at("code")) << finished.err;
  EXPECT_EQ(fs::file_size("bad"), 0u) << "no host is excluded";
  fs::remove("bad");
  EXPECT_EQ(names_in("."), before);
  std::cout << "healthy world: " << found.at("seconds") << " s\n";
}

TEST_F(DoctorProcess, FaultsOfHosts) {
  const json report = examined("1:clock=120 2:cores=1 3:connect 2:space=1000000", 2,
                               {{"OMP_NUM_THREADS", "64"}, {"SLURM_NTASKS", "8"}});
  expect_found(report, "clock", "fail", "node1", {1}, "the clock is 120 s ahead");
  expect_found(report, "threads", "warn", "node2", {2}, "64 threads on 1 core");
  expect_found(report, "network", "warn", "node3", {3}, "no TCP connection to rank 0 on node0");
  expect_found(report, "memory files", "fail", "node2", {}, "1.0 MiB are free in /");
  expect_found(report, "world", "warn", "", {0, 1, 2, 3},
               "the Slurm job has 8 tasks, but mpirun started 4");
  EXPECT_EQ(report.at("exclude"), json({"node1", "node2"}));
}

TEST_F(DoctorProcess, FaultsOfSharedFolders) {
  const json report = examined("1:flock 2:fsync 3:blind 0:quota", 6);
  expect_found(report, "run folder", "warn", "node1", {1}, "locks (flock) in");
  expect_found(report, "run folder", "fail", "node2", {2}, "fsync of '");
  expect_found(report, "run folder", "fail", "node3", {3}, "does not see what rank 0 writes");
  expect_found(report, "space", "fail", "", {0}, "write of '");
  EXPECT_EQ(report.at("exclude"), json({"node2", "node3"})) << "the quota is not node0's fault";
  EXPECT_EQ(names_in(".").size(), 3u) << "trials are removed";
}

TEST_F(DoctorProcess, AFolderThatRank0CannotMake) {
  const json report = examined("0:readonly", 6);
  expect_found(report, "run folder", "fail", "node0", {0}, "mkdir of '");
  EXPECT_EQ(findings(report, "run folder").size(), 1u) << report.dump(2);
  expect_found(report, "space", "fail", "", {0}, "Read-only file system");
}

TEST_F(DoctorProcess, SpaceIsNoFaultOfTheHostOfRank0) {
  const json report = examined("0:quota", 6);
  expect_found(report, "space", "fail", "", {0}, "write of '");
  EXPECT_THAT(report.at("exclude"), IsEmpty());
}

TEST_F(DoctorProcess, FaultsOfFileSystems) {
  const json report = examined("1:rename 2:readonly 3:pread 0:space=2000", 4);
  expect_found(report, "run folder", "fail", "node1", {1}, "rename of '");
  expect_found(report, "run folder", "fail", "node2", {2}, "Read-only file system");
  expect_found(report, "corpus", "fail", "node3", {3}, "Input/output error");
  expect_found(report, "space", "fail", "", {}, "MB free, but 3 of ");
}

// The second rank is started by a shell that sets limits. Sanitized programs need all address
// space.
TEST_F(DoctorProcess, FaultsOfLimits) {
  const std::string limits = kSanitized ? "ulimit -n 200" : "ulimit -n 200; ulimit -v 80000000";
  Command command =
      with_faults({"doctor", "--no-speed", "--json", "report.json"}, "0:host=node0 1:host=node1");
  const std::vector<std::string> line = command.line;
  command.line = {"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "1"};
  command.line.insert(command.line.end(), line.begin(), line.end());
  command.line.insert(command.line.end(),
                      {":", "-n", "1", "bash", "-c", limits + "; exec \"$0\" \"$@\""});
  command.line.insert(command.line.end(), line.begin(), line.end());
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
  const json found = report(finished);
  expect_found(found, "limits", "warn", "node1", {1}, "200 open files are allowed");
  if (!kSanitized) {
    expect_found(found, "limits", "warn", "node1", {1}, "the address space is limited");
  }
}

// A rank without the device of the others leaves none of them waiting for it.
TEST_F(DoctorProcess, RanksOnDifferentDevicesExchangeNothing) {
  const std::vector<std::string> first = {"doctor", "tiny.txtpb", "--json", "report.json"};
  std::vector<std::string> second = first;
  second.insert(second.end(), {"--set", "device=cuda"});
  Command command = with_faults({}, "0:host=node0 1:host=node1");
  command.line = {"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "1"};
  for (const std::string& word : birkhoff_line(first)) command.line.push_back(word);
  command.line.insert(command.line.end(), {":", "-n", "1"});
  for (const std::string& word : birkhoff_line(second)) command.line.push_back(word);
  const Finished finished = run_child(command);
  const json found = report(finished);
  expect_found(found, "exchange speed", "warn", "", {}, "not measured: rank 0 computes on a CPU");
  // With two hosts, either configuration may be the right one.
  expect_found(found, "configuration", "fail", "", {1}, "device: cuda instead of ");
}

// Each rank has its own folder, program or configuration.
TEST_F(DoctorProcess, RanksThatDiffer) {
  const auto rank = [](const std::string& folder, const std::string& program,
                       const std::string& steps) {
    return std::vector<std::string>{"-n",         "1",      "-wdir",
                                    folder,       program,  "doctor",
                                    "tiny.txtpb", "--set",  "train.steps=" + steps,
                                    "--no-speed", "--json", fs::absolute("report.json")};
  };
  const std::string here = fs::current_path(), other = here + "/other", program = program_path(),
                    build = other + "/birkhoff";
  fs::create_directory(other);
  fs::copy_file("tiny.txtpb", other + "/tiny.txtpb");
  write_bytes("other/text.txt", some_text(6000, 2));
  const Finished prepared =
      run_child({.line = birkhoff_line({"prepare", "--out", "other/corpus", "--tokenizer", "chars",
                                        "--valid", "0.2", "other/text.txt"})});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
  fs::copy_file(program, build);
  std::ofstream(build, std::ios::app | std::ios::binary) << '\0';

  Command command = with_faults({}, "1:host=node1 2:host=node2 3:host=node3 4:boot");
  command.line = {"mpirun", "--oversubscribe", "--bind-to", "none"};
  for (const auto& part :
       {rank(here, program, "300"), rank(here, program, "400"), rank(other, program, "300"),
        rank(here, build, "300"), rank(here, program, "300")}) {
    if (command.line.size() > 4) command.line.emplace_back(":");
    command.line.insert(command.line.end(), part.begin(), part.end());
  }
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 2) << finished.err;
  const json found = report(finished);
  const std::string host = found.at("hosts").at(0);
  expect_found(found, "configuration", "fail", "node1", {1}, "train.steps: 400 instead of 300");
  expect_found(found, "corpus", "fail", "node2", {2}, "corpus ");
  expect_found(found, "program", "fail", "node3", {3}, "file: ");
  expect_found(found, "hosts", "fail", host, {4},
               "rank 0 is on another machine with the same name");
  fs::remove_all(other);
}

TEST_F(DoctorProcess, ASlowRankIsNamedAndItsHostExcluded) {
  write_bytes("bad", "node9\n");
  const json report = examined("2:slow", 2, {{"OMP_NUM_THREADS", "2"}}, {"--exclude-file", "bad"});
  // Both of its threads have a CPU for a fifth of the time.
  const std::string share = "it had a CPU for ";
  const std::string slow =
      expect_found(report, "matrix speed", "fail", "node2", {2}, share.c_str());
  const std::size_t at = slow.find(share);
  ASSERT_NE(at, std::string::npos);
  EXPECT_LT(std::stoi(slow.substr(at + share.size())), 30) << slow;
  std::ifstream file("bad");
  const std::string excluded((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(excluded, AllOf(HasSubstr("node2\n"), HasSubstr("node9\n")));
  fs::remove("bad");
}

// As containers may forbid it. Open MPI would print a line for each message.
TEST_F(DoctorProcess, RanksThatMayNotReadEachOthersMemoryExchangeInSilence) {
  Command command = with_faults(
      {"bench", "comm", "--ranks", "2", "--bytes", "1K-1M", "--rounds", "3"}, "0:cma 1:cma");
  // The environment of these tests has it, which would leave nothing to do.
  command.environment.emplace_back("OMPI_MCA_btl_vader_single_copy_mechanism", std::nullopt);
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.err.find("errno"), std::string::npos) << finished.err;
}

// Before its first step `train` runs the checks that take no time.
TEST_F(DoctorProcess, TrainingEndsBeforeItsFirstStep) {
  const Finished finished =
      run_child(with_faults({"train", "tiny.txtpb", "--run", "refused", "--ranks", "2"}, "1:boot"));
  EXPECT_EQ(finished.code, 2) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("birkhoff: hosts: "),
                                  HasSubstr(", rank 1: rank 0 is on another machine"),
                                  HasSubstr("give each machine its own host name")));
  EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
  EXPECT_FALSE(fs::exists("refused"));
}

}  // namespace
}  // namespace birkhoff
