#include "launcher/doctor/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace birkhoff {

const configs::Config& Subject::config() const {
  if (!configuration) fail(ExitCode::kConfig, "{}", configuration_error);
  return *configuration;
}

Majority majority_of(const Answers& answers, const char* key) {
  std::vector<std::string> values;
  for (const Answer& answer : answers) values.push_back(answer.facts.at(key).get<std::string>());
  std::map<std::string, std::ptrdiff_t> counts;
  for (const std::string& value : values) ++counts[value];
  Majority majority;
  // max_element returns the first of equals.
  majority.value =
      *std::max_element(values.begin(), values.end(),
                        [&](const auto& a, const auto& b) { return counts[a] < counts[b]; });
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (values[i] != majority.value) majority.others.push_back(&answers[i]);
  }
  return majority;
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
    judgement.findings.push_back({slowest < kVerySlow * usual ? Verdict::kFail : Verdict::kWarn,
                                  host.front().host, ranks, found, cure});
  }
  return judgement;
}

}  // namespace birkhoff
