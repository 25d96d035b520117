// What the doctor concludes from the facts of ranks. doctor_process_test.cpp makes real faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/doctor/examination.h"
#include "launcher/doctor/probes.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int kRanksOfHost = 2;

// One answer for each rank; two ranks a host: node0, node0, node1, node1, ...
Answers answers(const std::vector<Facts>& facts) {
  Answers all;
  for (std::size_t rank = 0; rank < facts.size(); ++rank) {
    all.push_back(
        {static_cast<int>(rank), "node" + std::to_string(rank / kRanksOfHost), facts[rank]});
  }
  return all;
}

// Expects one finding, and returns it.
Finding only(const Judgement& judgement) {
  EXPECT_THAT(judgement.findings, SizeIs(1));
  return judgement.findings.empty() ? Finding{} : judgement.findings.front();
}

void expect_finding(const Finding& finding, Verdict verdict, const std::string& host,
                    const std::vector<int>& ranks, const std::string& found) {
  EXPECT_EQ(finding.verdict, verdict) << finding.found;
  EXPECT_EQ(finding.host, host) << finding.found;
  EXPECT_EQ(finding.ranks, ranks) << finding.found;
  EXPECT_THAT(finding.found, HasSubstr(found));
  EXPECT_NE(finding.cure, "") << finding.found;
}

const Check& check_named(const std::string& name) {
  for (const Check& check : all_checks()) {
    if (check.name == name) return check;
  }
  ADD_FAILURE() << "no check " << name;
  return all_checks().front();
}

// ---- What runs

TEST(JudgeWorld, RanksThatAreNotSlurmsTasks) {
  const auto facts = [](const char* tasks, bool by_srun) {
    return Facts{{"ranks", 2}, {"tasks", tasks}, {"by_srun", by_srun}};
  };
  EXPECT_THAT(judge_world(answers({facts("", false), facts("", false)})).findings, IsEmpty());
  EXPECT_THAT(judge_world(answers({facts("2", true), facts("2", true)})).findings, IsEmpty());
  expect_finding(only(judge_world(answers({facts("2", true), facts("8", true)}))), Verdict::kFail,
                 "node0", {1}, "Slurm started 8 tasks, but MPI sees 2 ranks");
  expect_finding(only(judge_world(answers({facts("8", false)}))), Verdict::kWarn, "node0", {0},
                 "the Slurm job has 8 tasks");
}

TEST(JudgeProgram, TheMinorityIsNamedEvenIfItIsRank0) {
  const auto facts = [](const char* file, const char* mpi) {
    return Facts{{"file", file}, {"MPI library", mpi}};
  };
  const Facts usual = facts("abc", "Open MPI 4.1.4");
  EXPECT_THAT(judge_program(answers({usual, usual})).findings, IsEmpty());
  expect_finding(only(judge_program(answers({facts("def", "Open MPI 4.1.4"), usual, usual}))),
                 Verdict::kFail, "node0", {0}, "file: def instead of abc");
  expect_finding(only(judge_program(answers({usual, usual, facts("abc", "Open MPI 5.0.3")}))),
                 Verdict::kFail, "node1", {2}, "MPI library: Open MPI 5.0.3 instead of");
}

TEST(JudgeConfiguration, TheMinorityIsNamedWithItsFields) {
  const auto facts = [](const char* hash, const char* difference) {
    return Facts{{"hash", hash}, {"from_rank_0", difference}};
  };
  expect_finding(only(judge_configuration(answers(
                     {facts("a", ""), facts("a", ""), facts("b", "train.steps: 8 instead of 4")}))),
                 Verdict::kFail, "node1", {2}, "train.steps: 8 instead of 4");
  expect_finding(only(judge_configuration(answers({facts("a", ""), facts("b", "x: 1 instead of 2"),
                                                   facts("b", "x: 1 instead of 2")}))),
                 Verdict::kFail, "node0", {0}, "differs from that of most ranks");
}

TEST(JudgeGpus, SharedOnesFailAndOtherKindsWarn) {
  const auto facts = [](const char* uuid, const char* name, bool shared = false) {
    return Facts{{"gpu", uuid}, {"name", name}, {"shared", shared}};
  };
  EXPECT_THAT(judge_gpus(answers({{{"gpu", ""}}, {{"gpu", ""}}})).findings, IsEmpty());
  EXPECT_THAT(judge_gpus(answers({facts("a", "H100"), facts("b", "H100")})).findings, IsEmpty());
  expect_finding(only(judge_gpus(answers({facts("a", "H100"), facts("b", "H100"),
                                          facts("c", "H100"), facts("c", "H100")}))),
                 Verdict::kFail, "node1", {2, 3}, "share GPU c");
  EXPECT_THAT(judge_gpus(answers({facts("a", "H100", true), facts("a", "H100", true)})).findings,
              IsEmpty());
  expect_finding(
      only(judge_gpus(answers({facts("a", "H100"), facts("b", "H100"), facts("c", "A100")}))),
      Verdict::kWarn, "node1", {2}, "A100 instead of H100");
}

// ---- Where it runs

TEST(JudgeLimits, NamesEachLimit) {
  const Facts good = {{"ranks", 2},          {"open_files", 4096}, {"locked_bytes", 65536},
                      {"address_bytes", -1}, {"core_bytes", 0},    {"infiniband", false}};
  EXPECT_THAT(judge_limits(answers({good, good})).findings, IsEmpty());
  const auto with = [&](const char* name, const Facts& value) {
    Facts facts = good;
    facts[name] = value;
    return only(judge_limits(answers({good, facts})));
  };
  expect_finding(with("open_files", 259), Verdict::kWarn, "node0", {1}, "259 open files");
  expect_finding(with("infiniband", true), Verdict::kWarn, "node0", {1},
                 "65536 bytes may be locked");
  expect_finding(with("address_bytes", 1 << 30), Verdict::kWarn, "node0", {1}, "address space");
  expect_finding(with("core_bytes", -1), Verdict::kWarn, "node0", {1}, "core files");
}

TEST(JudgeThreads, CoresThatRanksShare) {
  const auto facts = [](int threads, std::vector<int> cores) {
    return Facts{{"threads", threads}, {"cores", cores}};
  };
  EXPECT_THAT(judge_threads(answers({facts(1, {0}), facts(1, {1})})).findings, IsEmpty());
  EXPECT_THAT(judge_threads(answers({facts(2, {0, 1, 2, 3}), facts(2, {0, 1, 2, 3})})).findings,
              IsEmpty());
  expect_finding(
      only(judge_threads(answers({facts(1, {0}), facts(1, {1}), facts(1, {0}), facts(1, {0})}))),
      Verdict::kWarn, "node1", {}, "2 ranks with 2 threads share 1 core");
}

TEST(JudgeClock, SecondsWarnAndMinutesFail) {
  const auto facts = [](double ahead) {
    return Facts{{"readings", {1000 + ahead, 1001 + ahead, 1002 + ahead}}};
  };
  EXPECT_THAT(judge_clock(answers({facts(0), facts(0.9), facts(-0.9)})).findings, IsEmpty());
  expect_finding(only(judge_clock(answers({facts(0), facts(0), facts(-3)}))), Verdict::kWarn,
                 "node1", {2}, "3 s behind");
  expect_finding(only(judge_clock(answers({facts(0), facts(0), facts(600)}))), Verdict::kFail,
                 "node1", {2}, "600 s ahead");
}

// ---- Where its files are

TEST(JudgeRunFolder, TwoFoldersOfOneName) {
  const auto facts = [](bool sees, const char* inode) {
    return Facts{{"folder", "/x"}, {"sees", sees}, {"inode", inode}, {"locked", true}};
  };
  Facts first = facts(true, "5");
  first["names"] = {"rank-0", "rank-1", "rank-2"};
  EXPECT_THAT(judge_run_folder(answers({first, facts(true, "5"), facts(true, "5")})).findings,
              IsEmpty());
  expect_finding(only(judge_run_folder(answers({first, facts(true, "5"), facts(true, "6")}))),
                 Verdict::kWarn, "node1", {2}, "another inode");
  expect_finding(only(judge_run_folder(
                     answers({first, facts(true, "5"), facts(true, "5"), facts(true, "5")}))),
                 Verdict::kFail, "node1", {3}, "rank 0 does not see what it writes");
}

TEST(JudgeSpace, OneSaveOrAll) {
  const auto judged = [](double free) {
    return judge_space(answers(
        {{{"folder", "/x"}, {"checkpoint", 100}, {"kept", 3}, {"free", free}, {"speed", 1.0}}}));
  };
  EXPECT_THAT(judged(300).findings, IsEmpty());
  EXPECT_EQ(only(judged(299)).verdict, Verdict::kWarn);
  EXPECT_EQ(only(judged(99)).verdict, Verdict::kFail);
}

// ---- Speed

TEST(JudgeSpeed, OneSlowHostIsNamed) {
  const auto facts = [](std::vector<double> speeds) {
    std::vector<Facts> all;
    for (const double speed : speeds) all.push_back({{"speed", speed}});
    return judge_speed(answers(all), "GB/s", "look");
  };
  EXPECT_THAT(facts({10, 10, 8.1, 12}).findings, IsEmpty());
  expect_finding(only(facts({10, 10, 10, 7.9})), Verdict::kWarn, "node1", {3}, "7.9 GB/s, 79 % of");
  expect_finding(only(facts({10, 10, 10, 4.9})), Verdict::kFail, "node1", {3}, "49 %");
  expect_finding(only(judge_speed(answers({{{"speed", 10}, {"cpu_share", 1}},
                                           {{"speed", 7}, {"cpu_share", 0.7}}}),
                                  "GB/s", "look")),
                 Verdict::kWarn, "node0", {1}, "it had a CPU for 70 %");
  // Half of all ranks are slow: the fast half is right.
  expect_finding(only(facts({10, 10, 4, 4})), Verdict::kFail, "node1", {2, 3}, "40 %");
  expect_finding(only(facts({4, 4, 10, 10, 10, 10})), Verdict::kFail, "node0", {0, 1}, "40 %");
}

// ---- All checks together

Examination examined(const Check& check, const Answers& all) {
  Examination examination{.ranks = static_cast<int>(all.size()), .hosts = {}, .checks = {}};
  for (const Answers& host : by_host(all)) examination.hosts.push_back(host.front().host);
  examination.checks.push_back(judge(check, all));
  return examination;
}

TEST(Examination, AProbeThatFailsIsAFindingWithItsCure) {
  const Facts good = {{"folder", "/x"}, {"sees", true}, {"inode", "5"}, {"locked", true}},
              broken = {{"error", "fsync of '/x': Input/output error; mend the disk"}};
  const Examination result =
      examined(check_named("run folder"), answers({good, good, broken, broken}));
  ASSERT_THAT(result.checks.front().judgement.findings, SizeIs(1)) << "equal ones are one";
  const Finding& finding = result.checks.front().judgement.findings.front();
  expect_finding(finding, Verdict::kFail, "node1", {2, 3}, "fsync of '/x': Input/output error");
  EXPECT_EQ(finding.cure, "mend the disk");
  EXPECT_EQ(place_text(finding), "node1, ranks 2, 3");
  EXPECT_EQ(result.code(), ExitCode::kStorage);
  EXPECT_THAT(result.failures(),
              ElementsAre("run folder: node1, ranks 2, 3: fsync of '/x': Input/output error; mend "
                          "the disk"));
  EXPECT_THAT(result.hosts_to_exclude(), ElementsAre("node1"));
}

TEST(Examination, WhatAllHostsHaveIsNoFaultOfAHost) {
  const Facts broken = {{"error", "read-only"}};
  const Examination result = examined(check_named("run folder"), answers({broken, broken, broken}));
  ASSERT_THAT(result.checks.front().judgement.findings, SizeIs(1));
  EXPECT_EQ(place_text(result.checks.front().judgement.findings.front()), "ranks 0, 1, 2");
  EXPECT_EQ(result.verdict(), Verdict::kFail);
  EXPECT_THAT(result.hosts_to_exclude(), IsEmpty());
  // Also if each host fails in its own way.
  EXPECT_THAT(
      examined(check_named("run folder"), answers({broken, broken, {{"error", "no space"}}}))
          .hosts_to_exclude(),
      IsEmpty());
  // A single host has no other to compare it with.
  EXPECT_EQ(place_text(examined(check_named("run folder"), answers({broken, broken}))
                           .checks.front()
                           .judgement.findings.front()),
            "node0, ranks 0, 1");
}

TEST(Examination, ExcludesHostsThatFailAlone) {
  const Facts good = {{"readings", {0, 0, 0}}}, late = {{"readings", {90, 90, 90}}},
              soon = {{"readings", {2, 2, 2}}};
  const Examination result =
      examined(check_named("clock"), answers({good, good, late, good, soon, good}));
  EXPECT_THAT(result.hosts_to_exclude(), ElementsAre("node1")) << "warnings exclude nothing";
  EXPECT_EQ(result.verdict(), Verdict::kFail);
  const Facts json = result.json();
  EXPECT_EQ(json.at("verdict"), "fail");
  EXPECT_EQ(json.at("code"), 2);
  EXPECT_EQ(json.at("exclude"), Facts({"node1"}));
  EXPECT_EQ(json.at("checks").at(0).at("findings").at(0).at("ranks"), Facts({2}));
}

}  // namespace
}  // namespace birkhoff
