#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "configs/loader/site_io.h"
#include "launcher/commands.h"
#include "launcher/processes/restarts.h"
#include "launcher/runs/run_summary.h"
#include "launcher/slurm/run_jobs.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/display_text.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::size_t kMaxPastJobs = 5;  // listed

// The known state of a run. `summary` is empty until its first job has begun.
struct Known {
  fs::path folder;
  std::optional<RunSummary> summary;
  std::vector<QueuedJob> queued;  // its jobs in the queue
  bool squeue_answers = true;
  std::optional<SubmittedJob> newest = {};  // of its jobs
};

struct State {
  std::string name, reason;
};

const JobEnd* last_end(const Known& run) {
  if (!run.summary || run.summary->jobs.empty()) return nullptr;
  const Job& last = run.summary->jobs.back();
  return last.end ? &*last.end : nullptr;
}

State state_of(const Known& run) {
  if (run.summary && run.summary->holder) return {"running", *run.summary->holder};
  if (run.summary && run.summary->state == RunState::kFinished)
    return {"finished", run.summary->ended_early ? "early: evaluate.patience" : ""};
  const JobEnd* end = last_end(run);
  const std::string ended = end == nullptr ? "" : end->reason;
  for (const QueuedJob& job : run.queued) {
    if (job.is_active()) return {"starting or ending", "job " + job.id + " is " + job.state};
  }
  if (!run.queued.empty()) {
    const QueuedJob& job = run.queued.front();
    const std::string waits = fmt::format("job {} waits: {}", job.id, job.reason);
    return end == nullptr ? State{"queued", waits} : State{"requeued", waits + "; " + ended};
  }
  if (run.summary && run.summary->state == RunState::kDiverged) return {"diverged", ended};
  // The run's own history knows only of jobs that began to train.
  const auto recorded = run.newest ? recorded_end(*run.newest) : std::nullopt;
  if (recorded && (end == nullptr || end->code != recorded->code) && is_failure(recorded->code)) {
    return {"failed", fmt::format("job {}: {}: see {}", run.newest->id, recorded->text,
                                  run.newest->output.string())};
  }
  if (end != nullptr && is_failure(end->code)) {
    return {"failed", end->code < 0 ? ended : fmt::format("exit {}: {}", end->code, ended)};
  }
  if (end != nullptr) return {"stopped", ended};
  return {"new", ""};
}

std::int64_t steps_left(const RunSummary& run) {
  if (run.ended_early) return 0;
  return std::max<std::int64_t>(run.config.train().steps() - run.step, 0);
}

// The time of the remaining steps at the measured speed; NaN if unknown.
double seconds_left(const RunSummary& run) {
  return static_cast<double>(steps_left(run)) * figures_of(run.records).step_ms / 1000;
}

// Seconds of a text like "1:03:20"; NaN for "UNLIMITED".
double seconds_of(const std::string& slurm) {
  const auto time = slurm_time(slurm);
  return time ? static_cast<double>(time->count()) : kUnknown;
}

std::string text_of(const Known& run) {
  std::string text;
  const auto line = [&text](const char* name, const std::string& what) {
    text += fmt::format("{:<12} {}\n", name, display_text(what));
  };
  const State state = state_of(run);
  line("run", run.folder.string());
  line("state", state.name + (state.reason.empty() ? "" : " (" + state.reason + ")"));
  if (run.summary) {
    const RunSummary& summary = *run.summary;
    const RunFigures figures = figures_of(summary.records);
    const std::int64_t steps = summary.config.train().steps();
    line("step",
         fmt::format("{} of {}, {:.1f} %", summary.step, steps,
                     100.0 * static_cast<double>(summary.step) / static_cast<double>(steps)));
    line("speed", std::isnan(figures.step_ms)
                      ? "-"
                      : fmt::format("{} tokens/s, {:.1f} ms per step",
                                    whole_text(figures.tokens_per_second), figures.step_ms));
    line("time left", time_text(seconds_left(summary)) + " of steps");
    line("checkpoint",
         summary.checkpoints.empty() ? "none yet" : step_name(summary.checkpoints.back()));
    if (!summary.jobs.empty()) line("history", history_text(summary));
    const std::size_t first = summary.jobs.size() - std::min(summary.jobs.size(), kMaxPastJobs);
    for (std::size_t i = first; i < summary.jobs.size(); ++i) {
      line("trained", job_text(summary.jobs[i]));
    }
  }
  for (const QueuedJob& job : run.queued) {
    line("job", job.is_active() ? fmt::format("{}: {} on {}, {} left of its limit", job.id,
                                              job.state, job.nodes, job.time_left)
                                : fmt::format("{}: {}, {}", job.id, job.state, job.reason));
  }
  if (!run.squeue_answers) line("job", "squeue does not answer: the queue is not known");
  return text;
}

// Numbers that are not known are NaN, which JSON shows as null.
ordered_json json_of(const Known& run) {
  const State state = state_of(run);
  ordered_json json = {
      {"run", run.folder.string()}, {"state", state.name}, {"reason", state.reason}};
  if (run.summary) {
    const RunSummary& summary = *run.summary;
    const RunFigures figures = figures_of(summary.records);
    const RunTotals totals = totals_of(summary);
    json["step"] = summary.step;
    json["steps"] = summary.config.train().steps();
    json["tokens_per_second"] = figures.tokens_per_second;
    json["step_ms"] = figures.step_ms;
    json["seconds_left"] = seconds_left(summary);
    json["checkpoint_step"] = summary.checkpoints.empty() ? 0 : summary.checkpoints.back();
    json["restarts"] = totals.restarts;
    json["lost_steps"] = totals.lost_steps;
    json["lost_seconds"] = totals.lost_seconds;
    json["effective"] = totals.effective_seconds / totals.seconds;
    ordered_json ends = ordered_json::array();
    for (const Job& job : summary.jobs) {
      if (job.end)
        ends.push_back(
            {{"step", job.end->step}, {"code", job.end->code}, {"reason", job.end->reason}});
    }
    json["ends"] = ends;
  }
  json["squeue_answers"] = run.squeue_answers;
  json["jobs"] = ordered_json::array();
  for (const QueuedJob& job : run.queued) {
    json["jobs"].push_back({{"id", job.id},
                            {"state", job.state},
                            {"nodes", job.nodes},
                            {"seconds_left", seconds_of(job.time_left)},
                            {"reason", job.reason}});
  }
  return json;
}

Known known_of(const fs::path& folder, const RunJobs& jobs) {
  Known run{.folder = folder, .summary = {}, .queued = {}, .squeue_answers = jobs.squeue_answers};
  if (is_run(folder) && path_exists(RunPaths{folder}.config().string())) {
    run.summary = read_run(folder);
  }
  std::vector<std::string> ids;
  for (const SubmittedJob& job : jobs.submitted) {
    if (job.run != folder) continue;
    ids.push_back(job.id);
    run.newest = job;
  }
  run.queued = jobs_with(jobs.queued, ids);
  return run;
}

}  // namespace

int status_command(const StatusArguments& arguments, std::ostream& out, std::ostream&) {
  const RunJobs jobs = jobs_of(arguments.run);
  bool first = true;
  for (const fs::path& folder : runs_in(arguments.run, jobs)) {
    const Known run = known_of(folder, jobs);
    if (arguments.json) {
      out << json_of(run).dump(-1, ' ', false, ordered_json::error_handler_t::replace) << '\n';
    } else {
      out << (first ? "" : "\n") << text_of(run);
    }
    first = false;
  }
  return 0;
}

}  // namespace birkhoff
