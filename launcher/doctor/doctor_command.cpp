#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ostream>

#include "cluster/base/activity.h"
#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"
#include "cluster/health/heartbeat.h"
#include "configs/loader/config_io.h"
#include "launcher/commands.h"
#include "launcher/doctor/examination.h"
#include "launcher/doctor/exclude_file.h"
#include "launcher/processes/ranks.h"
#include "launcher/processes/supervisor.h"
#include "launcher/runs/text_table.h"
#include "launcher/runs/train_checks.h"

namespace birkhoff {
namespace {

constexpr std::chrono::seconds kMaxSeconds{60};

// A rank that is stuck in a check is named, and the doctor ends within its minute.
constexpr WatchdogLimits kLimits{.seconds = 20, .steps = 4, .patient_seconds = 40};

// One row for each check that passes, and one for each finding.
std::string table_of(const Examination& examination) {
  std::vector<std::vector<std::string>> rows;
  for (const ExaminedCheck& examined : examination.checks) {
    if (examined.judgement.findings.empty()) {
      rows.push_back({examined.check->name, "pass", "", examined.judgement.summary});
    }
    for (const Finding& finding : examined.judgement.findings) {
      rows.push_back({examined.check->name, verdict_name(finding.verdict), place_text(finding),
                      finding.found});
      if (!finding.cure.empty()) rows.push_back({"", "", "", "-> " + finding.cure});
    }
  }
  return text_table({{"check"}, {"verdict"}, {"where"}, {"found"}}, rows);
}

int examine_in_world(const DoctorArguments& arguments, World& world, std::ostream& out,
                     std::ostream& err) {
  const auto start = std::chrono::steady_clock::now();
  const Log log(world.rank());  // names the rank that warns
  Subject subject{.world = world, .threads = threads_of_rank(world.cores())};
  compute_on_cpu(std::min(subject.threads, usable_cores()));  // too many would take minutes
  if (arguments.config) {
    // Each rank reads its own file, which may differ.
    try {
      subject.configuration = load_run_config(*arguments.config, arguments.settings, arguments.run);
    } catch (const Error& error) {
      subject.configuration_error = error.what();
    }
  }
  if (!arguments.run.empty()) subject.run = arguments.run;
  Activity activity;
  const Heartbeat heartbeat(
      world.group(), kLimits, [&] { return make_status(world, activity, {&world.group()}); },
      [&](const Diagnosis& diagnosis) {
        err << "birkhoff: doctor: " << diagnosis.text << std::endl;
        world.abort(static_cast<int>(diagnosis.code));
      });
  const Examination examination =
      examine(subject, arguments.no_speed ? Cost::kSeconds : Cost::kMeasurement);
  if (world.rank() != 0) return static_cast<int>(examination.code());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  out << table_of(examination)
      << fmt::format("{}: {} on {}, examined in {:.1f} s\n", verdict_name(examination.verdict()),
                     counted(examination.ranks, "rank"), counted(examination.hosts.size(), "host"),
                     seconds.count());
  if (!arguments.json.empty()) {
    Facts json = examination.json();
    json["seconds"] = seconds.count();
    write_file_durably(arguments.json,
                       json.dump(2, ' ', false, Facts::error_handler_t::replace) + '\n');
  }
  if (!arguments.exclude_file.empty()) {
    add_hosts_to_file(arguments.exclude_file, examination.hosts_to_exclude());
  }
  return static_cast<int>(examination.code());
}

std::vector<std::string> line_of_ranks(const DoctorArguments& arguments) {
  std::vector<std::string> line = {"doctor"};
  if (arguments.config) line.push_back(*arguments.config);
  for (const std::string& setting : arguments.settings) {
    line.insert(line.end(), {"--set", setting});
  }
  for (const auto& [name, value] :
       {std::pair("--run", arguments.run), std::pair("--json", arguments.json),
        std::pair("--exclude-file", arguments.exclude_file)}) {
    if (!value.empty()) line.insert(line.end(), {name, value});
  }
  if (arguments.no_speed) line.emplace_back("--no-speed");
  return line;
}

}  // namespace

int doctor_command(const DoctorArguments& arguments, std::ostream& out, std::ostream& err) {
  StopSignals signals;  // as for `train`: the supervisor's request must not kill a rank
  const int ranks = ranks_to_run_on(arguments.ranks);
  if (arguments.config && is_pipe(*arguments.config)) {
    fail(ExitCode::kUsage, "{}: a pipe, but every rank reads CONFIG: give a file",
         *arguments.config);
  }
  if (!arguments.config && !arguments.settings.empty()) {
    fail(ExitCode::kUsage, "--set {} without CONFIG: name the configuration that it changes",
         arguments.settings.front());
  }
  check_before_ranks([&] {
    const std::string& excluded = arguments.exclude_file;
    if (!excluded.empty() && path_exists(excluded)) hosts_in_file(excluded);
  });
  if (!arguments.ranks) {
    return run_in_any_world(
        [&](World& world) { return examine_in_world(arguments, world, out, err); }, err);
  }
  check_before_ranks([&] {
    if (arguments.config) load_run_config(*arguments.config, arguments.settings, arguments.run);
  });
  Placement placement{ranks};
  const std::optional<SlurmJob> slurm = SlurmJob::of_environment();
  if (slurm) {
    std::string why;
    const auto placed = place(*slurm, {.ranks = ranks, .min_ranks = ranks}, slurm->nodes, why);
    if (!placed) fail(ExitCode::kUsage, "{}", why);
    placement = *placed;
  }
  RankProgram program = rank_program(arguments.launch, slurm.has_value());
  // It leaves no traces, and its own watchdog ends it within a minute of its start.
  program.look = [](const std::string&) { return TracesOfJob{}; };
  program.launch_limit += kMaxSeconds;
  // A rank that was lost once may have met Open MPI's race at the start (docs/runbook.md), not a
  // fault of its host.
  for (int tries = 3;; --tries) {
    const int code = supervise(placement, program, line_of_ranks(arguments), signals, err).code;
    const bool again = code == static_cast<int>(ExitCode::kPeer) && tries > 1;
    if (!again || signals.received() != 0) return code;
    err << "birkhoff: doctor: a rank was lost: examining again" << std::endl;
  }
}

}  // namespace birkhoff
