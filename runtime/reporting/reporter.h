// Reporters: the metrics, history and log lines of one rank of a running training. The base class
// reports nothing.
#pragma once

#include <cstdint>
#include <string>

#include "cluster/base/logging/log.h"
#include "runtime/reporting/metrics.h"
#include "runtime/reporting/progress.h"
#include "runtime/reporting/reports.h"
#include "runtime/reporting/run_history.h"

namespace birkhoff {

class Reporter {
 public:
  virtual ~Reporter() = default;

  // Call after each step; `tokens`: counted targets of the step.
  virtual void step(const StepReport& report, std::int64_t tokens) { (void)report, (void)tokens; }
  virtual void evaluation(std::int64_t step, const std::string& split,
                          const Evaluation& evaluation) {
    (void)step, (void)split, (void)evaluation;
  }
  // The newest checkpoint is that of `step`; `seconds`: that the slowest save took.
  virtual void saved(std::int64_t step, double seconds) { (void)step, (void)seconds; }
  // Size of metrics.jsonl (Metrics::lines_bytes).
  virtual std::int64_t metrics_bytes() const { return 0; }
};

// Writes a line for each due step to the log file of a rank without metrics, with its own times.
class StepLog final : public Reporter {
 public:
  StepLog(std::int64_t every, std::int64_t num_steps) : every_(every), num_steps_(num_steps) {}
  void step(const StepReport& report, std::int64_t tokens) override {
    const StepReport mean = means_.add(report, tokens);
    if (!is_line_due(mean.step, every_, num_steps_)) return;
    log_to_file(LogLevel::kInfo, progress_line(mean, num_steps_));
    means_.restart();
  }

 private:
  const std::int64_t every_, num_steps_;
  StepMeans means_;
};

// Rank 0's: the run's metrics and history, which must outlive it.
class RunReporter final : public Reporter {
 public:
  RunReporter(Metrics& metrics, RunHistory& history) : metrics_(metrics), history_(history) {}
  void step(const StepReport& report, std::int64_t tokens) override {
    metrics_.step(report, tokens);
    history_.step(report.step, report.step_ms, tokens);
  }
  void evaluation(std::int64_t step, const std::string& split,
                  const Evaluation& evaluation) override {
    metrics_.evaluation(step, split, evaluation);
  }
  void saved(std::int64_t step, double seconds) override { history_.saved(step, seconds); }
  std::int64_t metrics_bytes() const override { return metrics_.lines_bytes(); }

 private:
  Metrics& metrics_;
  RunHistory& history_;
};

}  // namespace birkhoff
