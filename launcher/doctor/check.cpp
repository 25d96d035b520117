#include "launcher/doctor/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace birkhoff {

const configs::Config& Subject::config() const {
  if (!configuration) fail(ExitCode::kConfig, "{}", configuration_error);
  return *configuration;
}

std::string fact_of(const Answer& answer, const std::string& key) {
  return answer.facts.value(key, "none");
}

Majority majority_of(const Answers& answers, const std::string& key) {
  if (answers.empty()) return {};
  std::map<std::string, std::size_t> counts;
  for (const Answer& answer : answers) ++counts[fact_of(answer, key)];
  // max_element returns the first of equal elements.
  const Answer& usual =
      *std::max_element(answers.begin(), answers.end(), [&](const Answer& a, const Answer& b) {
        return counts[fact_of(a, key)] < counts[fact_of(b, key)];
      });
  Majority majority{fact_of(usual, key), {}};
  const bool is_strict = 2 * counts[majority.value] > answers.size();
  for (const Answer& answer : answers) {
    if (fact_of(answer, key) == majority.value) continue;
    majority.others.push_back(answer);
    if (!is_strict) majority.others.back().host.clear();
  }
  if (!is_strict) majority.value += fmt::format(" on rank {}", usual.rank);
  return majority;
}

std::string add_minority(Judgement& judgement, Verdict verdict, const Answers& answers,
                         const std::string& key, const std::string& subject, const char* cure) {
  const Majority majority = majority_of(answers, key);
  for (const Answer& other : majority.others) {
    judgement.add(verdict, other,
                  fmt::format("{}{} instead of {}", subject, fact_of(other, key), majority.value),
                  cure);
  }
  return majority.value;
}

std::vector<Answers> by_host(const Answers& answers) {
  std::vector<Answers> hosts;
  for (const Answer& answer : answers) {
    const auto found = std::find_if(hosts.begin(), hosts.end(), [&](const Answers& host) {
      return host.front().host == answer.host;
    });
    if (found == hosts.end()) {
      hosts.push_back({answer});
    } else {
      found->push_back(answer);
    }
  }
  return hosts;
}

Judgement judge_speed(const Answers& answers, const char* unit, const char* cure) {
  const auto speed = [](const Answer& answer) { return answer.facts.at("speed").get<double>(); };
  std::vector<double> sorted;
  for (const Answer& answer : answers) sorted.push_back(speed(answer));
  std::sort(sorted.begin(), sorted.end());
  const double usual = sorted[sorted.size() / 2];
  Judgement judgement{
      fmt::format("{:.3g} to {:.3g} {} a rank", sorted.front(), sorted.back(), unit)};
  for (const Answers& host : by_host(answers)) {
    std::vector<int> ranks;
    double slowest = usual, cpu_share = 1;
    for (const Answer& answer : host) {
      if (speed(answer) >= kSlow * usual) continue;
      ranks.push_back(answer.rank);
      if (speed(answer) >= slowest) continue;
      slowest = speed(answer);
      cpu_share = answer.facts.value("cpu_share", 1.0);
    }
    if (ranks.empty()) continue;
    std::string found = fmt::format("{:.3g} {}, {:.0f} % of the usual {:.3g} {}", slowest, unit,
                                    100 * slowest / usual, usual, unit);
    if (cpu_share < kFullShare) {
      found += fmt::format("; it had a CPU for {:.0f} % of the time", 100 * cpu_share);
    }
    judgement.add(slowest < kVerySlow * usual ? Verdict::kFail : Verdict::kWarn, host.front().host,
                  ranks, found, cure);
  }
  return judgement;
}

}  // namespace birkhoff
