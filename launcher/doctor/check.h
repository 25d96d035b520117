// `birkhoff doctor`: the type of its checks of ranks, their hosts and their files. A check's probe
// looks at one rank; its judge compares what all ranks have found and needs neither MPI nor a host.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/world.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

// The subject of an examination: a world of ranks, and the training they are to run, as far as
// known.
struct Subject {
  World& world;
  int threads = 1;  // of this rank
  std::optional<configs::Config> configuration = {};
  std::string configuration_error = {};           // why there is none, although one was named
  std::optional<std::filesystem::path> run = {};  // need not exist

  bool names_configuration() const { return configuration || !configuration_error.empty(); }
  // Error(kConfig) with configuration_error if there is none.
  const configs::Config& config() const;
};

using Facts = nlohmann::ordered_json;

// The facts that one rank has found for a check.
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

  void add(Verdict verdict, std::string host, std::vector<int> ranks, std::string found,
           std::string cure) {
    findings.push_back(
        {verdict, std::move(host), std::move(ranks), std::move(found), std::move(cure)});
  }
  // Adds a finding about one rank.
  void add(Verdict verdict, const Answer& answer, std::string found, std::string cure) {
    add(verdict, answer.host, {answer.rank}, std::move(found), std::move(cure));
  }
};

// Looks at this rank. Error: the rank fails the check, with its text. With scope kRank it may
// communicate (collective over the world), and must then not skip an operation because of an error.
using Probe = Facts(const Subject&);
// Gets the answers of all ranks that were probed without an error, at least one.
using Judge = Judgement(const Answers&);

enum class Scope { kOnce, kHost, kRank };                       // who is probed
enum class Needs { kNothing, kConfigFile, kRunFolder, kBoth };  // of the command line
enum class Cost { kInstant, kSeconds, kMeasurement };           // `train` runs the instant ones

struct Check {
  const char* name;
  Scope scope;
  Needs needs;
  Cost cost;
  ExitCode code;  // of a job that ends because it fails
  Probe* probe;
  Judge* judge;
};

// ---- For judges.

// The text of facts[key]; "none" if the rank has no such fact.
std::string fact_of(const Answer& answer, const std::string& key);

// The value of facts[key] on most ranks, and the answers that differ from it. If no value has a
// majority (more than half of the ranks), any may be the right one: then the differing answers
// blame no host, and `value`, one of the most frequent, names its lowest rank ("abc on rank 0").
struct Majority {
  std::string value;
  Answers others;
};
Majority majority_of(const Answers& answers, const std::string& key);
// Adds a finding about each answer with another value of facts[key] than most: the subject, which
// ends with what separates it from a value, then "VALUE instead of USUAL". Returns the usual value.
std::string add_minority(Judgement& judgement, Verdict verdict, const Answers& answers,
                         const std::string& key, const std::string& subject, const char* cure);

// The answers of each host, in the order of ranks.
std::vector<Answers> by_host(const Answers& answers);

// The hosts whose ranks are slower than the reference facts["speed"], the upper median over ranks
// (with two hosts it is the faster one's): a warning below 80 % of it, a failure below 50 %. If
// facts["cpu_share"] of a host's slowest rank is below kFullShare, the finding says so: another
// program takes its CPU.
inline constexpr double kSlow = 0.8, kVerySlow = 0.5, kFullShare = 0.9;
Judgement judge_speed(const Answers& answers, const char* unit, const char* cure);

}  // namespace birkhoff
