#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <ostream>
#include <set>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/config_io.h"
#include "configs/loader/message_text.h"
#include "configs/loader/site_io.h"
#include "data/corpus/corpus.h"
#include "launcher/commands.h"
#include "launcher/doctor/exclude_file.h"
#include "launcher/failure.h"
#include "launcher/plan/plan.h"
#include "launcher/processes/command_output.h"
#include "launcher/processes/supervisor.h"
#include "launcher/runs/run_summary.h"
#include "launcher/runs/train_checks.h"
#include "launcher/slurm/batch_script.h"
#include "launcher/slurm/run_jobs.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kSbatchLimit{120};
constexpr int kMaxRanks = 4096;  // of `train --ranks`

// One run of a submission.
struct Planned {
  fs::path folder;
  std::vector<std::string> settings;
  configs::Config config = {};
};

// A value as the name of a folder.
std::string folder_name(const std::string& value) {
  std::string name;
  for (const char c : value) {
    const bool safe = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' ||
                      c == '+' || c == '_';
    name += safe ? c : '_';
  }
  return name.starts_with('.') || name.starts_with('-') ? "_" + name.substr(1) : name;
}

// The runs to submit, and what each changes in the configuration.
std::vector<Planned> runs_of(const SubmitArguments& arguments) {
  const fs::path run = absolute_run(arguments.run);
  if (find_invalid_utf8(run.string()) != std::string::npos) {
    fail(ExitCode::kUsage, "--run {}: is not UTF-8: rename it", quoted(run.string()));
  }
  if (arguments.sweep.empty()) return {Planned{run, arguments.settings}};
  const std::size_t equals = arguments.sweep.find('=');
  if (equals == std::string::npos || equals == 0 || equals + 1 == arguments.sweep.size()) {
    fail(ExitCode::kUsage, "--sweep {}: expected path=value,value,...", quoted(arguments.sweep));
  }
  if (is_run(run)) {
    fail(ExitCode::kUsage,
         "{}: is a run, and the runs of a sweep are folders in --run: choose another",
         run.string());
  }
  std::vector<Planned> runs;
  std::set<std::string> names;
  for (std::size_t begin = equals + 1; begin <= arguments.sweep.size();) {
    const std::size_t end = std::min(arguments.sweep.find(',', begin), arguments.sweep.size());
    const std::string value = arguments.sweep.substr(begin, end - begin);
    begin = end + 1;
    const std::string name = folder_name(value);
    if (value.empty() || name.size() > 128 || !names.insert(name).second) {
      fail(ExitCode::kUsage,
           "--sweep {}: the value {} {}: give each value once, in a few characters",
           quoted(arguments.sweep), quoted(value),
           value.empty()       ? "is empty"
           : name.size() > 128 ? "is too long for the name of a folder"
                               : "has the folder name " + name + " of another one");
    }
    runs.push_back({run / name, arguments.settings});
    runs.back().settings.push_back(arguments.sweep.substr(0, equals + 1) + value);
  }
  return runs;
}

int ranks_of(const SubmitArguments& arguments, const configs::Site& site) {
  if (arguments.spare_nodes >= arguments.nodes) {
    fail(ExitCode::kUsage, "--spare-nodes {} leaves none of --nodes {}: lower it",
         arguments.spare_nodes, arguments.nodes);
  }
  const std::int64_t ranks =
      std::int64_t{arguments.nodes - arguments.spare_nodes} * site.ranks_per_node();
  if (ranks > kMaxRanks) {
    fail(ExitCode::kUsage, "--nodes {} with {} ranks on each are more than {} ranks: lower it",
         arguments.nodes, site.ranks_per_node(), kMaxRanks);
  }
  if (arguments.min_ranks.value_or(1) > ranks) {
    fail(ExitCode::kUsage, "--min-ranks {} is above the {} of {}: lower it", *arguments.min_ranks,
         counted(ranks, "rank"), counted(arguments.nodes - arguments.spare_nodes, "node"));
  }
  return static_cast<int>(ranks);
}

// The profile must fit the job and its configuration.
void check_site(const SubmitArguments& arguments, const configs::Site& site,
                std::chrono::seconds limit, const configs::Config& config) {
  if (std::chrono::seconds(site.signal_seconds()) >= limit) {
    fail(ExitCode::kUsage,
         "a time limit of {} is not longer than signal_seconds {} of {}: raise --time",
         time_text(static_cast<double>(limit.count())), site.signal_seconds(), arguments.site);
  }
  if (config.device() == configs::Config::cuda && site.gpus_per_node() == 0) {
    fail(ExitCode::kConfig,
         "{}: gpus_per_node is 0, and device is cuda in {}: name the GPUs of a node, or choose "
         "another profile",
         arguments.site, arguments.config);
  }
  if (const int tensor = config.mesh().tensor();
      arguments.min_ranks.value_or(tensor) % tensor != 0) {
    fail(ExitCode::kUsage, "--min-ranks {} is not a multiple of mesh.tensor {}: choose one that is",
         *arguments.min_ranks, tensor);
  }
  if (!site.container().empty() && !path_exists(site.container())) {
    fail(ExitCode::kConfig, "{}: container: {} does not exist", arguments.site,
         quoted(site.container()));
  }
}

// Checks that the run fits the profile's memory per rank. Refuses it on CPUs; only warns on GPUs,
// because the prediction is for kernels that keep more.
void check_memory(const SubmitArguments& arguments, const configs::Site& site,
                  const configs::Config& config, int ranks, std::ostream& err) {
  if (site.rank_memory_gb() == 0) return;
  PlanRequest request;
  request.config = config;
  request.vocabulary = vocabulary_of(config, Corpus(config.data().corpus()));
  request.ranks = ranks;
  request.ranks_per_node = site.ranks_per_node();
  const double bytes = rank_memory(make_plan(request));
  if (bytes <= site.rank_memory_gb() * 1e9) return;
  const std::string what = fmt::format(
      "a rank needs {:.3g} GB and has {:.3g} (rank_memory_gb of {}): lower train.micro_batch or "
      "evaluate.micro_batch, or set train.recompute or train.zero_stage; `birkhoff plan` shows the "
      "parts",
      bytes / 1e9, site.rank_memory_gb(), arguments.site);
  if (config.device() == configs::Config::cpu) fail(ExitCode::kConfig, "{}", what);
  err << "birkhoff: warning: " << one_line(what) << '\n';
}

// Warns if a step and a save, as far as an earlier job measured them, do not fit.
void warn_of_short_time(const fs::path& run, const configs::Site& site, std::chrono::seconds limit,
                        std::ostream& err) {
  if (!is_run(run) || !path_exists(RunPaths{run}.config().string())) return;
  const RunSummary summary = read_run(run);
  const double step_ms = figures_of(summary.records).step_ms;
  if (!(step_ms > 0)) return;
  const double needed = step_ms / 1000 + (summary.status ? summary.status->save_seconds : 0);
  const auto warn = [&](const std::string& what) {
    err << fmt::format("birkhoff: warning: {}: a step and a save took {:.1f} s, but {}\n",
                       run.string(), needed, one_line(what));
  };
  if (needed > static_cast<double>(limit.count())) {
    warn(fmt::format("the time limit is {} s: raise --time", limit.count()));
  } else if (site.signal_seconds() > 0 && needed > site.signal_seconds()) {
    warn(fmt::format("signal_seconds is {}: raise it, or the last save may be lost",
                     site.signal_seconds()));
  }
}

void check_not_queued(const fs::path& run) {
  const RunJobs jobs = known_jobs(run);
  if (!jobs.squeue_answers) {
    fail(ExitCode::kUsage,
         "{}: squeue does not answer, so it is not known whether a job of it waits: try again",
         run.string());
  }
  if (jobs.queued.empty()) return;
  fail(ExitCode::kUsage,
       "{}: its job {} is in the queue ({}): wait for its end, or `birkhoff cancel` it first",
       run.string(), jobs.queued[0].id, jobs.queued[0].state);
}

// The options of `train` for the start of ranks.
std::vector<std::string> launch_options(const configs::Site& site, int ranks) {
  std::vector<std::string> options = {"--ranks", std::to_string(ranks)};
  const auto add = [&options](const char* name, const std::string& value) {
    options.insert(options.end(), {name, value});
  };
  if (site.launcher() == configs::Site::mpirun) add("--launcher", "mpirun");
  if (!site.container().empty()) add("--container", site.container());
  if (site.has_launch_seconds()) add("--launch-seconds", std::to_string(site.launch_seconds()));
  return options;
}

std::vector<std::string> train_options(const SubmitArguments& arguments, const configs::Site& site,
                                       int ranks) {
  std::vector<std::string> options = launch_options(site, ranks);
  const auto add = [&options](const char* name, int value) {
    options.insert(options.end(), {name, std::to_string(value)});
  };
  add("--restarts", arguments.restarts);
  if (arguments.spare_nodes > 0) add("--spare-nodes", arguments.spare_nodes);
  if (arguments.min_ranks) add("--min-ranks", *arguments.min_ranks);
  return options;
}

// Spare nodes are examined, too. Empty: no examination.
std::vector<std::string> doctor_options(const SubmitArguments& arguments, const configs::Site& site,
                                        const fs::path& submission) {
  if (!site.doctor()) return {};
  std::vector<std::string> options = launch_options(site, arguments.nodes * site.ranks_per_node());
  options.insert(options.end(),
                 {"--no-speed", "--exclude-file", (submission / "exclude").string()});
  return options;
}

// Removes variables from this process's environment, and so from a job's: those of the job or step
// in which `submit` is called, which would pass for the new job's, and sbatch's, which would
// override options of the script. Keeps variables that say how to reach Slurm, and sbatch's for
// options that the profile does not set.
void forget_callers_job(const configs::Site& site, std::ostream& err) {
  const bool in_job = std::getenv("SLURM_JOB_ID") != nullptr;
  std::set<std::string> settings = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SBATCH_CLUSTERS"};
  if (site.account().empty()) settings.insert("SBATCH_ACCOUNT");
  if (site.partition().empty()) settings.insert("SBATCH_PARTITION");
  if (site.qos().empty()) settings.insert("SBATCH_QOS");
  std::vector<std::string> replacing, names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string name(text.substr(0, text.find('=')));
    const auto begins = [&](const char* prefix) { return name.starts_with(prefix); };
    if (settings.contains(name) || begins("PMIX_MCA_")) continue;
    if (begins("SBATCH_")) replacing.push_back(name);
    if (begins("SBATCH_") || begins("SRUN_") || begins("PMI_") || begins("PMIX_") ||
        (in_job && begins("SLURM"))) {
      names.push_back(name);
    }
  }
  for (const std::string& name : names) unsetenv(name.c_str());
  if (replacing.empty()) return;
  std::sort(replacing.begin(), replacing.end());
  err << fmt::format(
      "birkhoff: warning: {}: not passed on to sbatch: the profile and the options of `submit` say "
      "what the job is, `sbatch:` of the profile for the rest\n",
      fmt::join(replacing, ", "));
}

// The output of sbatch.
std::string sbatch(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "sbatch");
  const CommandOutput output = output_of(arguments, kSbatchLimit);
  if (output.code == 0) return output.out;
  const std::string why = output.code == 127 ? "it is not in PATH: submit where Slurm is installed"
                          : output.code == -1
                              ? fmt::format("no answer in {} s", kSbatchLimit.count())
                              : output.err;
  fail(ExitCode::kUsage, "sbatch did not take the job: {}", why);
}

// Returns the job's id. `after`: the job that must have ended first; empty: none.
std::string queue_script(const fs::path& script, const std::string& after) {
  std::vector<std::string> arguments = {"--parsable"};
  if (!after.empty()) arguments.push_back("--dependency=afterany:" + after);
  arguments.push_back(script.string());
  if (!after.empty()) arguments.push_back(after);
  const std::string printed = sbatch(std::move(arguments));
  const std::string id = printed.substr(0, printed.find_first_not_of("0123456789"));
  if (id.empty()) fail(ExitCode::kUsage, "sbatch printed no job id: {}", quoted(printed));
  return id;
}

// Creates the folder; fails if another submission has just taken it.
void create_folder(const fs::path& folder) {
  make_directory(folder.parent_path().string());
  std::error_code error;
  if (!fs::create_directory(folder, error)) {
    fail(ExitCode::kStorage, "{}: cannot be created ({}): submit once more", folder.string(),
         error ? error.message() : "it has just appeared");
  }
}

// Error(kUsage) if a process holds the run.
void check_not_held(const fs::path& run) {
  if (const auto holder = run_holder(RunPaths{run})) {
    fail(ExitCode::kUsage, "the run folder {} is in use by {}: wait for it or stop it",
         run.string(), *holder);
  }
}

// Writes the files and queues the jobs. Returns their ids.
std::vector<std::string> queue_jobs(const BatchJob& job, const std::string& script_text,
                                    const std::vector<Planned>& runs,
                                    const SubmitArguments& arguments) {
  const fs::path& folder = job.output_folder;
  create_folder(folder);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    write_file_durably(job.runs[i].config.string(), config_text(runs[i].config));
  }
  const fs::path script = folder / "job.sh";
  write_file_durably(script.string(), script_text);
  std::vector<std::string> ids;
  try {
    if (arguments.fresh) {
      sbatch({"--test-only", script.string()});
      // All are checked before the first one moves, so a sweep moves as a whole or not at all.
      for (const Planned& run : runs) check_not_held(run.folder);
      for (const Planned& run : runs) {
        RunFolder(run.folder, run.config.train().seed(), /*fresh=*/true);
      }
    }
    ids.push_back(queue_script(script, ""));
  } catch (const Error&) {
    remove_tree(folder.string());
    throw;
  }
  std::vector<SubmittedJob> jobs;
  for (int i = 0; i < arguments.chain; ++i) {
    if (i > 0) ids.push_back(queue_script(script, ids.back()));
    for (std::size_t run = 0; run < runs.size(); ++run) {
      const std::string id = runs.size() == 1 ? ids.back() : fmt::format("{}_{}", ids.back(), run);
      jobs.push_back({.id = id, .run = runs[run].folder, .output = {}, .end = {}});
    }
    write_jobs(folder, jobs);  // after each job, so that none is forgotten
  }
  return ids;
}

}  // namespace

int submit_command(const SubmitArguments& arguments, std::ostream& out, std::ostream& err) {
  configs::Site site = load_site(arguments.site);
  if (!arguments.exclude_file.empty()) {
    for (const std::string& host : hosts_in_file(arguments.exclude_file)) site.add_exclude(host);
  }
  const std::string time = arguments.time.empty() ? site.time_limit() : arguments.time;
  const std::optional<std::chrono::seconds> limit = slurm_time(time);
  if (!limit) {
    fail(ExitCode::kUsage, "--time {}: is not a time: write days-hours:minutes:seconds",
         quoted(time));
  }
  const int ranks = ranks_of(arguments, site);
  const fs::path folder = next_submission(arguments.run);
  std::vector<Planned> runs = runs_of(arguments);
  BatchJob job{.name = arguments.name.empty() ? absolute_run(arguments.run).filename().string()
                                              : arguments.name,
               .time = time,
               .nodes = arguments.nodes,
               .program = own_path(),
               .work_folder = fs::current_path(),
               .output_folder = folder,
               .runs = {},
               .train_options = train_options(arguments, site, ranks),
               .doctor_options = doctor_options(arguments, site, folder)};
  const bool sweep = !arguments.sweep.empty();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    Planned& run = runs[i];
    run.config = check_before_start(
        {arguments.config, run.settings, run.folder.string(), arguments.fresh, ranks});
    check_site(arguments, site, *limit, run.config);
    check_memory(arguments, site, run.config, ranks, err);
    if (!arguments.fresh) warn_of_short_time(run.folder, site, *limit, err);
    const std::string file = sweep ? fmt::format("config-{}.txtpb", i) : "config.txtpb";
    job.runs.push_back({folder / file, run.folder});
  }
  const std::string script = batch_script(job, site);
  if (arguments.dry_run) {
    out << script;
    return 0;
  }
  forget_callers_job(site, err);
  for (const Planned& run : runs) check_not_queued(run.folder);
  for (const std::string& id : queue_jobs(job, script, runs, arguments)) {
    out << fmt::format("job {}: {}, {}{}, at most {}\n", id, counted(arguments.nodes, "node"),
                       counted(ranks, "rank"),
                       sweep ? " for each of " + counted(runs.size(), "run") : "", time);
  }
  out << "its script and output: " << folder.string() << '\n';
  return 0;
}

}  // namespace birkhoff
