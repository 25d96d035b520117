#include "runtime/reporting/reporter.h"

#include "cluster/base/logging/log.h"

namespace birkhoff {

void StepLog::step(const StepReport& report, std::int64_t tokens) {
  const StepReport mean = means_.add(report, tokens);
  if (!is_line_due(mean.step, every_, num_steps_)) return;
  log_to_file(LogLevel::kInfo, progress_line(mean, num_steps_));
  means_.restart();
}

void RunReporter::step(const StepReport& report, std::int64_t tokens) {
  metrics_.step(report, tokens);
  history_.step(report.step, report.step_ms, tokens);
}

void RunReporter::evaluation(std::int64_t step, const std::string& split,
                             const Evaluation& evaluation) {
  metrics_.evaluation(step, split, evaluation);
}

}  // namespace birkhoff
