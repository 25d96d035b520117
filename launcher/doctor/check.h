// `birkhoff doctor`: what a check of the ranks, their hosts and their files is. A check's probe
// looks at one rank; its judge compares what all ranks have found and needs neither MPI nor a host.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/world.h"
#include "configs/config.pb.h"

namespace birkhoff {

// What is examined: a world of ranks, and what they are to train, as far as it is known.
struct Subject {
  World& world;
  int threads = 1;  // that this rank computes with
  std::optional<configs::Config> configuration = {};
  std::string configuration_error = {};           // why there is none, although one was named
  std::optional<std::filesystem::path> run = {};  // need not exist

  bool names_configuration() const { return configuration || !configuration_error.empty(); }
  // Error(kConfig) with configuration_error if there is none.
  const configs::Config& config() const;
};

using Facts = nlohmann::ordered_json;

// What one rank has found out for a check.
struct Answer {
  int rank = 0;
  std::string host;
  Facts facts;
};
using Answers = std::vector<Answer>;  // in the order of ranks

enum class Verdict { kPass, kWarn, kFail };

struct Finding {
  Verdict verdict = Verdict::kPass;
  std::string host;        // empty: no host is to blame
  std::vector<int> ranks;  // empty: the host as a whole
  std::string found, cure;
};

struct Judgement {
  std::string summary;  // what was seen, for a check without findings
  std::vector<Finding> findings = {};
};

enum class Scope { kOnce, kHost, kRank };                       // who is probed
enum class Needs { kNothing, kConfigFile, kRunFolder, kBoth };  // of the command line
enum class Cost { kInstant, kSeconds, kMeasurement };           // `train` runs the instant ones

struct Check {
  const char* name;
  Scope scope;
  Needs needs;
  Cost cost;
  ExitCode code;  // of a job that ends because it fails
  // Error: the rank fails the check, with its text. With scope kRank it may communicate (collective
  // over the world), and must then not skip an operation because of an error.
  Facts (*probe)(const Subject&);
  // Gets the answers of all ranks that were probed without an error, at least one.
  Judgement (*judge)(const Answers&);
};

// ---- For judges.

// The text facts[key] of a rank; "none" if it has no such fact.
std::string fact_of(const Answer& answer, const std::string& key);

// What most ranks have as facts[key], and the answers of the others. If no value is that of more
// than half of the ranks, each may be the right one: then the others have no host, and `value`, one
// of the most frequent, names its lowest rank ("abc on rank 0").
struct Majority {
  std::string value;
  Answers others;
};
Majority majority_of(const Answers& answers, const char* key);

// The answers of each host, in the order of ranks.
std::vector<Answers> by_host(const Answers& answers);

// The hosts whose ranks measured less than the usual facts["speed"], which is the upper median of
// all ranks (the upper one, so that of two hosts the slower is compared with the faster): a warning
// below 80 % of it, a failure below 50 %. If facts["cpu_share"] of a host's slowest rank is below
// kFullShare, the finding says so: something takes its CPU.
inline constexpr double kSlow = 0.8, kVerySlow = 0.5, kFullShare = 0.9;
Judgement judge_speed(const Answers& answers, const char* unit, const char* cure);

}  // namespace birkhoff
