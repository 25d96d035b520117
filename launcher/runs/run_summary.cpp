#include "launcher/runs/run_summary.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/config_io.h"
#include "launcher/measure/report.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/progress.h"
#include "runtime/train_state.h"

namespace birkhoff {
namespace {

constexpr std::size_t kLastLines = 20;  // from which the speed is computed

bool has_diverged(const MetricsRecords& records) {
  const bool lost = !records.steps.empty() && records.steps.back().has_targets &&
                    std::isnan(records.steps.back().loss);
  return lost || (!records.evaluations.empty() && std::isnan(records.evaluations.back().loss));
}

// Whether evaluate.patience ended training at a checkpoint.
bool ended_early(const std::filesystem::path& checkpoint, const configs::Config& config) {
  if (config.evaluate().patience() == 0) return false;
  try {
    TrainState state;
    read_state(open_checkpoint(checkpoint).manifest, config, state);
    return state.ends_early(config.evaluate());
  } catch (const Error&) {
    return false;  // the next start reports it
  }
}

RunState state_of(const RunSummary& run) {
  if (run.holder) return RunState::kRunning;
  if (has_diverged(run.records)) return RunState::kDiverged;
  if (!run.checkpoints.empty() && run.checkpoints.back() >= run.config.train().steps())
    return RunState::kFinished;
  if (run.ended_early) return RunState::kFinished;
  return run.step == 0 ? RunState::kNew : RunState::kStopped;
}

std::int64_t time_changed(const RunPaths& paths) {
  for (const auto& file : {paths.metrics(), paths.identity()}) {
    struct stat status {};
    if (find_status(file.string(), /*follow_links=*/true, &status)) return status.st_mtime;
  }
  return 0;
}

template <typename Record>
Record least_loss(const std::vector<Record>& records) {
  Record best;
  for (const Record& record : records) {
    if (std::isfinite(record.loss) && !(record.loss >= best.loss)) best = record;
  }
  return best;
}

// The median of the last lines that have the figure.
double recent_median(const std::vector<StepRecord>& steps, double StepRecord::*figure) {
  std::vector<double> values;
  for (auto record = steps.rbegin(); record != steps.rend() && values.size() < kLastLines;
       ++record) {
    if (std::isfinite((*record).*figure)) values.push_back((*record).*figure);
  }
  return values.empty() ? kUnknown : median(values);
}

}  // namespace

std::string local_time(double unix_seconds) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S}",
                     fmt::localtime(static_cast<std::time_t>(unix_seconds)));
}

bool is_run(const std::filesystem::path& folder) {
  std::error_code unreadable;  // a folder that cannot be read is not a known run
  return std::filesystem::exists(RunPaths{folder}.identity(), unreadable);
}

RunSummary read_run(const std::filesystem::path& folder) {
  const RunPaths paths{folder};
  RunSummary run;
  run.folder = folder;
  // Read the lock before the run's files: a run that ends in between must not look like one that
  // stopped early.
  run.holder = run_holder(paths);
  run.config = load_config(paths.config(), {}, UselessValues::kKeep);
  run.records = read_metrics(paths.metrics());
  std::filesystem::path newest;
  for (const auto& [step, path] : list_checkpoints(paths.checkpoints())) {
    run.checkpoints.push_back(step);
    newest = path;
  }
  run.ended_early = !newest.empty() && ended_early(newest, run.config);
  auto& evaluations = run.records.evaluations;
  if (!evaluations.empty()) {
    const std::string split = evaluations.back().split;
    std::erase_if(evaluations, [&](const auto& record) { return record.split != split; });
    run.step = evaluations.back().step;
  }
  if (!run.records.steps.empty()) run.step = std::max(run.step, run.records.steps.back().step);
  if (!run.checkpoints.empty()) run.step = std::max(run.step, run.checkpoints.back());
  run.jobs = read_history(paths.history());
  run.status = read_status(paths.status());
  run.changed = time_changed(paths);
  run.state = state_of(run);
  return run;
}

const char* state_name(RunState state) {
  constexpr const char* kNames[] = {"new", "running", "stopped", "diverged", "finished"};
  return kNames[static_cast<std::size_t>(state)];
}

RunFigures figures_of(const MetricsRecords& records) {
  RunFigures figures;
  figures.best_step = least_loss(records.steps);
  figures.tokens_per_second = recent_median(records.steps, &StepRecord::tokens_per_second);
  figures.step_ms = recent_median(records.steps, &StepRecord::step_ms);
  if (!records.evaluations.empty()) {
    figures.last_evaluation = records.evaluations.back();
    const EvaluationRecord& last = figures.last_evaluation;
    std::vector<EvaluationRecord> alike = records.evaluations;
    std::erase_if(alike, [&](const EvaluationRecord& record) {
      return record.split != last.split || record.tokens < last.tokens ||
             record.tokens > last.tokens;
    });
    figures.best_evaluation = least_loss(alike);
  }
  if (records.steps.empty()) return figures;
  figures.last_step = records.steps.back();
  figures.seconds =
      std::fmax(figures.last_step.elapsed_seconds, figures.last_evaluation.elapsed_seconds);
  if (std::isnan(figures.seconds)) {
    figures.seconds = 0;
    figures.seconds_of_steps = true;
    std::int64_t before = 0;
    for (const StepRecord& record : records.steps) {
      figures.seconds += static_cast<double>(record.step - before) * record.step_ms / 1000;
      before = record.step;
    }
  }
  return figures;
}

RunTotals totals_of(const RunSummary& run) {
  if (run.jobs.empty()) return {};
  const Job& last = run.jobs.back();
  const double now = run.holder   ? unix_seconds()
                     : last.end   ? last.end->time
                     : run.status ? std::max(run.status->time, last.start.time)
                                  : last.start.time;
  return totals_of(run.jobs, run.status, now);
}

std::string job_text(const Job& job) {
  std::string text = fmt::format("{}: {} on {}, step {}", local_time(job.start.time),
                                 counted(job.start.ranks, "rank"), fmt::join(job.start.hosts, ", "),
                                 job.start.step);
  if (!job.start.scheduler_job.empty()) text += ", " + job.start.scheduler_job;
  if (!job.end) return text;
  text += fmt::format(" to {} at {}: ", job.end->step, local_time(job.end->time));
  if (job.end->code >= 0) text += fmt::format("exit {}, ", job.end->code);
  return text + job.end->reason;
}

std::string history_text(const RunSummary& run) {
  const RunTotals totals = totals_of(run);
  std::string text =
      fmt::format("{}, {} ({}) done again", counted(totals.restarts, "restart"),
                  counted(totals.lost_steps, "step"), time_text(totals.lost_seconds));
  if (totals.seconds > 0) {
    text += fmt::format("; {:.1f} % of {} was spent in steps that count",
                        100 * totals.effective_seconds / totals.seconds, time_text(totals.seconds));
  }
  return text;
}

std::string loss_text(double loss) {
  return std::isfinite(loss) ? fmt::format("{:.4f}", loss) : "-";
}

std::string whole_text(double value) {
  return std::isfinite(value) ? fmt::format("{:.0f}", value) : "-";
}

std::string time_text(double seconds) {
  return std::isfinite(seconds) ? duration_text(seconds) : "-";
}

}  // namespace birkhoff
