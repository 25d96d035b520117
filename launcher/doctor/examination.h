// `birkhoff doctor`: the run of the checks on all ranks, and the report of what they found.
#pragma once

#include <string>
#include <vector>

#include "launcher/doctor/check.h"

namespace birkhoff {

// All checks, in the order of their run.
const std::vector<Check>& all_checks();

struct ExaminedCheck {
  const Check* check;
  Judgement judgement;

  Verdict verdict() const;  // the worst
};

struct Examination {
  int ranks = 0;
  std::vector<std::string> hosts;  // in the order of ranks, each once
  std::vector<ExaminedCheck> checks;

  Verdict verdict() const;
  // Of the first check that fails; kOk if none does.
  ExitCode code() const;
  // The hosts with a failure. A check that fails on all hosts blames none of them.
  std::vector<std::string> hosts_to_exclude() const;
  // One line for each finding with this verdict: host, ranks, what was found, the cure.
  std::vector<std::string> lines(Verdict verdict) const;
  Facts json() const;  // docs/doctor.md describes it
};

// "node1, ranks 2, 3"; empty if no host is to blame.
std::string place_text(const Finding& finding);
const char* verdict_name(Verdict verdict);

// Judges `answers`; an answer with the fact "error" comes from a failed probe. Equal findings of
// several ranks of a host are joined. A finding on all hosts, or of a check that only rank 0 makes,
// blames no host.
ExaminedCheck judge(const Check& check, const Answers& answers);

// Runs the checks up to `most` whose needs `subject` fulfills, and returns the same on all ranks.
// Error(kUsage) if ranks were started with different arguments. Collective over the world.
Examination examine(const Subject& subject, Cost most);

}  // namespace birkhoff
