#include "launcher/doctor/examination.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <set>

#include "cluster/base/text/plural.h"
#include "launcher/doctor/probes.h"
#include "launcher/failure.h"

namespace birkhoff {
namespace {

bool is_fulfilled(Needs needs, const Subject& subject) {
  const bool config = needs == Needs::kConfigFile || needs == Needs::kBoth;
  const bool run = needs == Needs::kRunFolder || needs == Needs::kBoth;
  return (!config || subject.names_configuration()) && (!run || subject.run);
}

// The checks to run. Collective over the world.
std::vector<const Check*> chosen_checks(const Subject& subject, Cost most) {
  std::vector<const Check*> checks;
  std::string names;
  for (const Check& check : all_checks()) {
    if (check.cost > most || !is_fulfilled(check.needs, subject)) continue;
    checks.push_back(&check);
    names += std::string(check.name) + '\n';
  }
  const auto all = subject.world.group().all_gather_bytes(names, "doctor: checks");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      fail(ExitCode::kUsage,
           "rank {} was started with other arguments than rank 0: give all ranks CONFIG and --run, "
           "or none of them",
           rank);
    }
  }
  return checks;
}

// One rank stands for its host: the lowest of its machine, or of the host's name.
bool stands_for_host(const World& world, const std::vector<std::string>& host_of_rank) {
  const auto first = std::find(host_of_rank.begin(), host_of_rank.end(), world.host());
  return world.local_rank() == 0 || first - host_of_rank.begin() == world.rank();
}

// This rank's facts, by the name of the check. Collective over the world.
Facts probe_all(const Subject& subject, const std::vector<const Check*>& checks, bool for_host) {
  Facts all;
  for (const Check* check : checks) {
    if (check->scope == Scope::kHost && !for_host) continue;
    if (check->scope == Scope::kOnce && subject.world.rank() != 0) continue;
    try {
      all[check->name] = check->probe(subject);
    } catch (...) {
      all[check->name] = {{"error", describe_failure(std::current_exception()).what}};
    }
  }
  return all;
}

// Joins findings that differ only in their ranks.
std::vector<Finding> joined(const std::vector<Finding>& findings) {
  std::vector<Finding> result;
  for (const Finding& finding : findings) {
    const auto same = std::find_if(result.begin(), result.end(), [&](const Finding& other) {
      return other.verdict == finding.verdict && other.host == finding.host &&
             other.found == finding.found && other.cure == finding.cure;
    });
    if (same == result.end()) {
      result.push_back(finding);
    } else {
      same->ranks.insert(same->ranks.end(), finding.ranks.begin(), finding.ranks.end());
    }
  }
  return result;
}

// A finding on all of several hosts is no fault of any host.
void clear_common_host(std::vector<Finding>& findings, std::size_t num_hosts) {
  if (num_hosts < 2) return;
  for (const Finding& first : std::vector<Finding>(findings)) {
    const auto is_same = [&](const Finding& other) {
      return other.verdict == first.verdict && other.found == first.found &&
             other.cure == first.cure;
    };
    const auto count = std::count_if(findings.begin(), findings.end(), is_same);
    if (static_cast<std::size_t>(count) < num_hosts) continue;
    for (Finding& finding : findings) {
      if (is_same(finding)) finding.host.clear();
    }
  }
}

// The text of an Error says what is wrong and then what to do.
Finding finding_of_error(const Answer& answer) {
  const std::string error = answer.facts.at("error").get<std::string>();
  const std::size_t cure = error.rfind("; ");
  if (cure == std::string::npos) return {Verdict::kFail, answer.host, {answer.rank}, error, ""};
  return {Verdict::kFail,
          answer.host,
          {answer.rank},
          error.substr(0, cure),
          error.substr(cure + std::string_view("; ").size())};
}

}  // namespace

const std::vector<Check>& all_checks() {
  using enum Scope;
  using enum Needs;
  using enum Cost;
  using enum ExitCode;
  static const std::vector<Check> checks = {
      {"world", kRank, kNothing, kInstant, kUsage, probe_world, judge_world},
      {"hosts", kRank, kNothing, kInstant, kUsage, probe_hosts, judge_hosts},
      {"gpus", kRank, kConfigFile, kInstant, kUsage, probe_gpus, judge_gpus},
      {"threads", kRank, kNothing, kInstant, kUsage, probe_threads, judge_threads},
      {"program", kRank, kNothing, kSeconds, kUsage, probe_program, judge_program},
      {"configuration", kRank, kConfigFile, kSeconds, kConfig, probe_configuration,
       judge_configuration},
      {"corpus", kRank, kConfigFile, kSeconds, kData, probe_corpus, judge_corpus},
      {"limits", kRank, kNothing, kSeconds, kUsage, probe_limits, judge_limits},
      {"clock", kRank, kNothing, kSeconds, kUsage, probe_clock, judge_clock},
      {"network", kRank, kNothing, kSeconds, kPeer, probe_network, judge_network},
      {"memory files", kHost, kNothing, kSeconds, kStorage, probe_memory_files, judge_memory_files},
      {"run folder", kRank, kRunFolder, kSeconds, kStorage, probe_run_folder, judge_run_folder},
      {"space", kOnce, kBoth, kSeconds, kStorage, probe_space, judge_space},
      {"matrix speed", kRank, kNothing, kMeasurement, kUsage, probe_matrix_speed,
       judge_matrix_speed},
      {"memory speed", kRank, kNothing, kMeasurement, kUsage, probe_memory_speed,
       judge_memory_speed},
      {"exchange speed", kRank, kNothing, kMeasurement, kUsage, probe_exchange_speed,
       judge_exchange_speed},
  };
  return checks;
}

Verdict ExaminedCheck::verdict() const {
  Verdict worst = Verdict::kPass;
  for (const Finding& finding : judgement.findings) worst = std::max(worst, finding.verdict);
  return worst;
}

Verdict Examination::verdict() const {
  Verdict worst = Verdict::kPass;
  for (const ExaminedCheck& examined : checks) worst = std::max(worst, examined.verdict());
  return worst;
}

ExitCode Examination::code() const {
  for (const ExaminedCheck& examined : checks) {
    if (examined.verdict() == Verdict::kFail) return examined.check->code;
  }
  return ExitCode::kOk;
}

std::vector<std::string> Examination::hosts_to_exclude() const {
  std::set<std::string> excluded;
  for (const ExaminedCheck& examined : checks) {
    std::set<std::string> failing;
    for (const Finding& finding : examined.judgement.findings) {
      if (finding.verdict == Verdict::kFail && !finding.host.empty()) failing.insert(finding.host);
    }
    if (failing.size() < hosts.size()) excluded.insert(failing.begin(), failing.end());
  }
  return {excluded.begin(), excluded.end()};
}

std::vector<std::string> Examination::lines(Verdict verdict) const {
  std::vector<std::string> lines;
  for (const ExaminedCheck& examined : checks) {
    for (const Finding& finding : examined.judgement.findings) {
      if (finding.verdict != verdict) continue;
      const std::string place = place_text(finding);
      lines.push_back(fmt::format("{}: {}{}{}{}{}", examined.check->name, place,
                                  place.empty() ? "" : ": ", finding.found,
                                  finding.cure.empty() ? "" : "; ", finding.cure));
    }
  }
  return lines;
}

Facts Examination::json() const {
  Facts json = {{"format", "birkhoff doctor"},
                {"version", 1},
                {"verdict", verdict_name(verdict())},
                {"code", static_cast<int>(code())},
                {"ranks", ranks},
                {"hosts", hosts},
                {"exclude", hosts_to_exclude()},
                {"checks", Facts::array()}};
  for (const ExaminedCheck& examined : checks) {
    Facts findings = Facts::array();
    for (const Finding& finding : examined.judgement.findings) {
      findings.push_back({{"verdict", verdict_name(finding.verdict)},
                          {"host", finding.host},
                          {"ranks", finding.ranks},
                          {"found", finding.found},
                          {"cure", finding.cure}});
    }
    json["checks"].push_back({{"check", examined.check->name},
                              {"verdict", verdict_name(examined.verdict())},
                              {"summary", examined.judgement.summary},
                              {"findings", findings}});
  }
  return json;
}

std::string place_text(const Finding& finding) {
  if (finding.ranks.empty()) return finding.host;
  return fmt::format("{}{}rank{} {}", finding.host, finding.host.empty() ? "" : ", ",
                     finding.ranks.size() == 1 ? "" : "s", fmt::join(finding.ranks, ", "));
}

const char* verdict_name(Verdict verdict) {
  constexpr const char* kNames[] = {"pass", "warn", "fail"};
  return kNames[static_cast<std::size_t>(verdict)];
}

ExaminedCheck judge(const Check& check, const Answers& answers) {
  ExaminedCheck examined{&check, {}};
  Answers sound;
  std::vector<Finding> findings;
  for (const Answer& answer : answers) {
    if (answer.facts.contains("error")) {
      findings.push_back(finding_of_error(answer));
    } else {
      sound.push_back(answer);
    }
  }
  if (!sound.empty()) examined.judgement = check.judge(sound);
  findings.insert(findings.end(), examined.judgement.findings.begin(),
                  examined.judgement.findings.end());
  if (check.scope == Scope::kOnce) {  // any rank would find the same
    for (Finding& finding : findings) finding.host.clear();
  }
  findings = joined(findings);
  clear_common_host(findings, by_host(answers).size());
  examined.judgement.findings = joined(findings);
  return examined;
}

Examination examine(const Subject& subject, Cost most) {
  World& world = subject.world;
  const std::vector<std::string> host_of_rank =
      world.group().all_gather_bytes(world.host(), "doctor: hosts");
  const std::vector<const Check*> checks = chosen_checks(subject, most);
  const Facts mine = probe_all(subject, checks, stands_for_host(world, host_of_rank));
  const auto texts = world.group().all_gather_bytes(
      mine.dump(-1, ' ', false, Facts::error_handler_t::replace), "doctor: facts");
  Examination examination{.ranks = world.size(), .hosts = {}, .checks = {}};
  std::vector<Facts> facts_of_rank;
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    facts_of_rank.push_back(Facts::parse(texts[r]));
    if (std::find(examination.hosts.begin(), examination.hosts.end(), host_of_rank[r]) ==
        examination.hosts.end()) {
      examination.hosts.push_back(host_of_rank[r]);
    }
  }
  for (const Check* check : checks) {
    Answers answers;
    for (int rank = 0; rank < world.size(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      const auto found = facts_of_rank[r].find(check->name);
      if (found != facts_of_rank[r].end()) answers.push_back({rank, host_of_rank[r], *found});
    }
    examination.checks.push_back(judge(*check, answers));
  }
  return examination;
}

}  // namespace birkhoff
