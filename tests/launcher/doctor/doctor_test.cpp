// The doctor's conclusions from the facts of ranks. doctor_process_test.cpp makes real faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "launcher/doctor/examination.h"
#include "launcher/doctor/probes.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
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

Examination examined(const Check& check, const Answers& all) {
  Examination examination{.ranks = static_cast<int>(all.size()), .hosts = {}, .checks = {}};
  for (const Answers& host : by_host(all)) examination.hosts.push_back(host.front().host);
  examination.checks.push_back(judge(check, all));
  return examination;
}

// ---- Majorities

TEST(MajorityOf, OthersHaveAHostOnlyIfMoreThanHalfAgree) {
  const Facts a = {{"key", "a"}}, b = {{"key", "b"}}, c = {{"key", "c"}};
  const auto others = [](const Majority& majority) {
    std::vector<std::pair<int, std::string>> found;
    for (const Answer& other : majority.others) found.emplace_back(other.rank, other.host);
    return found;
  };
  const Majority strict = majority_of(answers({b, a, a}), "key");
  EXPECT_EQ(strict.value, "a");
  EXPECT_THAT(others(strict), ElementsAre(std::pair(0, "node0")));
  const Majority tie = majority_of(answers({a, a, b, b}), "key");
  EXPECT_EQ(tie.value, "a on rank 0");
  EXPECT_THAT(others(tie), ElementsAre(std::pair(2, ""), std::pair(3, "")));
  const Majority half = majority_of(answers({c, a, b, a}), "key");
  EXPECT_EQ(half.value, "a on rank 1") << "the most frequent, but not of more than half";
  EXPECT_THAT(others(half), ElementsAre(std::pair(0, ""), std::pair(2, "")));
  EXPECT_THAT(others(majority_of(answers({a, a, a}), "key")), IsEmpty());
}

TEST(MajorityOf, AMissingFactIsAnotherValue) {
  const Facts with = {{"key", "a"}}, without = Facts::object();
  const Majority majority = majority_of(answers({with, with, without}), "key");
  EXPECT_EQ(majority.value, "a");
  ASSERT_THAT(majority.others, SizeIs(1));
  EXPECT_EQ(majority.others.front().rank, 2);
  EXPECT_EQ(fact_of(majority.others.front(), "key"), "none");
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
  // Only a build with CUDA has NCCL.
  Facts cuda = usual;
  cuda["NCCL"] = "2.28.3";
  expect_finding(only(judge_program(answers({usual, usual, cuda}))), Verdict::kFail, "node1", {2},
                 "NCCL: 2.28.3 instead of none");
  expect_finding(only(judge_program(answers({usual, cuda, cuda}))), Verdict::kFail, "node0", {0},
                 "NCCL: none instead of 2.28.3");
}

TEST(JudgeProgram, OneOfTwoHostsIsNotBlamed) {
  const Facts a = {{"file", "abc"}}, b = {{"file", "def"}};
  const Examination result = examined(check_named("program"), answers({a, a, b, b}));
  expect_finding(only(result.checks.front().judgement), Verdict::kFail, "", {2, 3},
                 "file: def instead of abc on rank 0");
  EXPECT_THAT(result.hosts_to_exclude(), IsEmpty());
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
                 Verdict::kFail, "node0", {0}, "hash a instead of b");
  expect_finding(
      only(judge_configuration(answers({facts("a", ""), facts("b", "x: 1 instead of 2")}))),
      Verdict::kFail, "", {1}, "x: 1 instead of 2");
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
  // A rank that computes on the CPU has no other facts.
  const Facts cpu = {{"gpu", ""}};
  EXPECT_THAT(judge_gpus(answers({facts("a", "H100"), cpu, cpu})).findings, IsEmpty());
  expect_finding(only(judge_gpus(answers({cpu, cpu, facts("c", "H100"), facts("c", "H100")}))),
                 Verdict::kFail, "node1", {2, 3}, "share GPU c");
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

Facts clock_ahead(double seconds) {
  return {{"readings", {1000 + seconds, 1001 + seconds, 1002 + seconds}}};
}

TEST(JudgeClock, SecondsWarnAndMinutesFail) {
  const auto facts = clock_ahead;
  EXPECT_THAT(judge_clock(answers({facts(0), facts(0.9), facts(-0.9)})).findings, IsEmpty());
  expect_finding(only(judge_clock(answers({facts(0), facts(0), facts(-3)}))), Verdict::kWarn,
                 "node1", {2}, "3 s behind");
  expect_finding(only(judge_clock(answers({facts(0), facts(0), facts(600)}))), Verdict::kFail,
                 "node1", {2}, "600 s ahead");
}

TEST(JudgeClock, OneOfTwoHostsIsNotBlamed) {
  const auto facts = clock_ahead;
  const auto judged = [&](double first, double second) {
    return examined(check_named("clock"),
                    answers({facts(first), facts(first), facts(second), facts(second)}));
  };
  const Examination result = judged(0, 120);
  expect_finding(only(result.checks.front().judgement), Verdict::kFail, "", {},
                 "the clock of node1 is 120 s ahead of node0's");
  EXPECT_THAT(result.hosts_to_exclude(), IsEmpty());
  expect_finding(only(judged(0, -5).checks.front().judgement), Verdict::kWarn, "", {},
                 "the clock of node0 is 5 s ahead of node1's");
  EXPECT_THAT(judged(0, 0.9).checks.front().judgement.findings, IsEmpty());
}

// ---- Where its files are

TEST(JudgeRunFolder, TwoFoldersOfOneName) {
  const auto facts = [](bool sees, const char* inode) {
    return Facts{
        {"made", true}, {"folder", "/x"}, {"sees", sees}, {"inode", inode}, {"locked", true}};
  };
  Facts first = facts(true, "5");
  first["names"] = {"rank-0", "rank-1", "rank-2"};
  EXPECT_THAT(judge_run_folder(answers({first, facts(true, "5"), facts(true, "5")})).findings,
              IsEmpty());
  expect_finding(only(judge_run_folder(answers({first, facts(true, "5"), facts(true, "6")}))),
                 Verdict::kWarn, "node1", {2}, "/x has inode 6 instead of 5");
  // Those that do not see it have no say in its inode.
  const Facts blind = facts(false, "0");
  const Judgement judgement = judge_run_folder(answers({first, blind, blind, blind}));
  EXPECT_THAT(judgement.findings, SizeIs(3));
  for (const Finding& finding : judgement.findings) {
    EXPECT_THAT(finding.found, HasSubstr("does not see what rank 0 writes"));
  }
  expect_finding(only(judge_run_folder(
                     answers({first, facts(true, "5"), facts(true, "5"), facts(true, "5")}))),
                 Verdict::kFail, "node1", {3}, "rank 0 does not see what it writes");
}

TEST(JudgeRunFolder, AFailureOfRank0IsNotThatOfOthers) {
  const Facts failed = {{"error", "Read-only file system"}};
  const auto expect_only_rank_0 = [&](const Facts& other) {
    const Examination result = examined(check_named("run folder"), answers({failed, other, other}));
    const Finding finding = only(result.checks.front().judgement);
    EXPECT_EQ(place_text(finding), "node0, rank 0");
    EXPECT_EQ(finding.found, "Read-only file system");
  };
  // It has made no folder; it has failed in its folder, before it could hold the lock.
  expect_only_rank_0(
      {{"made", false}, {"folder", ""}, {"sees", false}, {"inode", "0"}, {"locked", false}});
  expect_only_rank_0(
      {{"made", true}, {"folder", "/x"}, {"sees", true}, {"inode", "5"}, {"locked", false}});
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
  EXPECT_THAT(only(facts({10, 10, 10, 7.9})).found, Not(HasSubstr("CPU"))) << "of ranks with GPUs";
  // Half of all ranks are slow: the fast half is right.
  expect_finding(only(facts({10, 10, 4, 4})), Verdict::kFail, "node1", {2, 3}, "40 %");
  expect_finding(only(facts({4, 4, 10, 10, 10, 10})), Verdict::kFail, "node0", {0, 1}, "40 %");
}

constexpr int kManyRanks = 100;

TEST(ExchangeRounds, PairsRanksOfDifferentHosts) {
  const std::vector<std::vector<int>> worlds = {
      {1},       {3},          {4},       {2, 2},       {4, 4},         {2, 2, 2},
      {4, 4, 4}, {2, 2, 2, 2}, {4, 2, 3}, {1, 3, 3, 2}, {2, 2, 2, 2, 2}};
  for (const std::vector<int>& ranks_of_host : worlds) {
    SCOPED_TRACE(testing::PrintToString(ranks_of_host));
    std::vector<std::string> hosts;
    for (std::size_t host = 0; host < ranks_of_host.size(); ++host) {
      for (int i = 0; i < ranks_of_host[host]; ++i) hosts.push_back("node" + std::to_string(host));
    }
    const bool several = ranks_of_host.size() > 1;
    const int smallest = *std::min_element(ranks_of_host.begin(), ranks_of_host.end());
    std::vector<std::set<std::string>> met(hosts.size());  // hosts, or ranks of the only one
    for (const std::vector<int>& partners : exchange_rounds(hosts, kManyRanks)) {
      ASSERT_THAT(partners, SizeIs(hosts.size()));
      std::map<std::string, int> pairs;
      for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
        if (partners[rank] < 0) continue;
        const auto partner = static_cast<std::size_t>(partners[rank]);
        ASSERT_LT(partner, hosts.size());
        EXPECT_NE(partner, rank);
        EXPECT_EQ(partners[partner], static_cast<int>(rank));
        EXPECT_TRUE(!several || hosts[partner] != hosts[rank]);
        met[rank].insert(several ? hosts[partner] : std::to_string(partner));
        ++pairs[hosts[rank]];
      }
      for (const auto& [host, count] : pairs) {
        EXPECT_TRUE(!several || count == smallest) << host << " shares its network with " << count;
      }
    }
    const std::size_t players = several ? ranks_of_host.size() : hosts.size();
    std::map<std::string, int> seen;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      if (several && seen[hosts[rank]]++ >= smallest) {
        EXPECT_THAT(met[rank], IsEmpty()) << rank << " has no counterpart on the smallest host";
      } else {
        EXPECT_GE(met[rank].size(), std::min<std::size_t>(players - 1, 2)) << rank;
      }
    }
  }
}

TEST(ExchangeRounds, RanksOfAHostNeedNotBeNeighbours) {
  EXPECT_THAT(exchange_rounds({"a", "b", "a", "b"}, kManyRanks),
              ElementsAre(ElementsAre(1, 0, 3, 2)));
}

// On two cores, two pairs of a host would measure each other.
TEST(ExchangeRounds, PairsTakeTurnsOnTheCoresOfAHost) {
  for (const int together : {1, 2, 3, 4, 5, kManyRanks}) {
    SCOPED_TRACE(together);
    for (const std::vector<std::string>& hosts :
         {std::vector<std::string>(5, "a"), {"a", "a", "a", "a", "b", "b", "b", "b"}}) {
      const bool several = hosts.front() != hosts.back();
      std::set<std::pair<int, int>> pairs;
      for (const std::vector<int>& partners : exchange_rounds(hosts, together)) {
        std::map<std::string, int> ranks;
        for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
          if (partners[rank] < 0) continue;
          pairs.emplace(rank, partners[rank]);
          ++ranks[hosts[rank]];
        }
        ASSERT_THAT(ranks, Not(IsEmpty()));
        for (const auto& [host, count] : ranks) EXPECT_LE(count, std::max(together, 2)) << host;
        if (several) {
          EXPECT_EQ(ranks["a"], ranks["b"]) << "hosts share the network equally";
        }
      }
      std::set<std::pair<int, int>> all;
      for (const std::vector<int>& partners : exchange_rounds(hosts, kManyRanks)) {
        for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
          if (partners[rank] >= 0) all.emplace(rank, partners[rank]);
        }
      }
      EXPECT_EQ(pairs, all);
    }
  }
}

TEST(JudgeExchangeSpeed, RanksWithoutAPartnerAreNotSlow) {
  const Facts fast = {{"speed", 10.0}}, slow = {{"speed", 4.0}}, idle = Facts::object();
  EXPECT_THAT(judge_exchange_speed(answers({idle})).findings, IsEmpty());
  EXPECT_THAT(judge_exchange_speed(answers({fast, idle, fast, idle})).findings, IsEmpty());
  expect_finding(only(judge_exchange_speed(answers({fast, idle, slow, idle, fast}))),
                 Verdict::kFail, "node1", {2}, "40 %");
}

TEST(JudgeExchangeSpeed, OtherFailuresBlameNoHost) {
  const Facts fast = {{"speed", 10.0}}, unmeasured = {{"unmeasured", "rank 1 on no device"}};
  Facts broken = fast;
  broken["failure"] = "with rank 3 on node1: NCCL";
  expect_finding(only(judge_exchange_speed(answers({broken, fast, fast}))), Verdict::kWarn, "", {0},
                 "exchange with rank 3 on node1: NCCL");
  expect_finding(only(judge_exchange_speed(answers({unmeasured, unmeasured}))), Verdict::kWarn, "",
                 {}, "not measured: rank 1 on no device");
}

// ---- All checks together

TEST(Examination, AProbeThatFailsIsAFindingWithItsCure) {
  const Facts good = {{"made", true},
                      {"folder", "/x"},
                      {"sees", true},
                      {"inode", "5"},
                      {"locked", true}},
              broken = {{"error", "fsync of '/x': Input/output error; mend the disk"}};
  const Examination result =
      examined(check_named("run folder"), answers({good, good, broken, broken}));
  ASSERT_THAT(result.checks.front().judgement.findings, SizeIs(1)) << "equal ones are one";
  const Finding& finding = result.checks.front().judgement.findings.front();
  expect_finding(finding, Verdict::kFail, "node1", {2, 3}, "fsync of '/x': Input/output error");
  EXPECT_EQ(finding.cure, "mend the disk");
  EXPECT_EQ(place_text(finding), "node1, ranks 2, 3");
  EXPECT_EQ(result.code(), ExitCode::kStorage);
  EXPECT_THAT(result.lines(Verdict::kFail),
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

TEST(Examination, WhatOnlyRank0TriesIsNoFaultOfItsHost) {
  Examination result =
      examined(check_named("space"), answers({{{"error", "no quota; free space"}}}));
  result.hosts = {"node0", "node1"};
  expect_finding(only(result.checks.front().judgement), Verdict::kFail, "", {0}, "no quota");
  EXPECT_THAT(result.hosts_to_exclude(), IsEmpty());
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
