#include "runtime/metrics.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cluster/base/log.h"
#include "runtime/metrics_reader.h"

namespace birkhoff {

using nlohmann::ordered_json;

// nlohmann::json writes numbers with the fewest digits that read back to the same value, and
// non-finite ones as null.
std::string step_line(const StepReport& report) {
  return ordered_json{{"step", report.step},
                      {"loss", report.loss},
                      {"tokens", report.tokens},
                      {"tokens_per_second", report.tokens_per_second},
                      {"step_ms", report.step_ms},
                      {"loader_wait_ms", report.loader_wait_ms},
                      {"learning_rate", report.learning_rate},
                      {"grad_norm", report.grad_norm}}
             .dump() +
         "\n";
}

std::string evaluation_line(std::int64_t step, const std::string& split,
                            const Evaluation& evaluation) {
  return ordered_json{{"step", step},
                      {"split", split},
                      {"loss", evaluation.loss},
                      {"bits_per_byte", evaluation.bits_per_byte},
                      {"tokens", evaluation.tokens},
                      {"bytes", evaluation.bytes}}
             .dump() +
         "\n";
}

Metrics::Metrics(MetricsOptions options)
    : options_(std::move(options)),
      bar_(stderr, options_.num_steps),
      lines_(File::open_for_append(options_.lines_path.string()),
             [this](const std::string& text) { warn(text); }) {
  read_curves();
  if (!options_.event_folder.empty()) {
    events_.emplace(options_.event_folder, options_.first_step,
                    [this](const std::string& text) { warn(text); });
  }
}

void Metrics::warn(const std::string& text) {
  clear_bar();
  log_warning("{}", text);
}

void Metrics::read_curves() {
  const MetricsRecords records = read_metrics(options_.lines_path);
  for (const StepRecord& record : records.steps) train_.add(record.step, record.loss);
  for (const EvaluationRecord& record : records.evaluations) {
    held_out_.add(record.step, record.loss);
  }
}

void Metrics::step(const StepReport& step, std::int64_t step_tokens) {
  ++interval_steps_;
  interval_tokens_ += step_tokens;
  interval_ms_ += step.step_ms;
  interval_wait_ms_ += step.loader_wait_ms;
  StepReport report = step;
  report.step_ms = interval_ms_ / static_cast<double>(interval_steps_);
  report.loader_wait_ms = interval_wait_ms_ / static_cast<double>(interval_steps_);
  report.tokens_per_second = 1000 * static_cast<double>(interval_tokens_) / interval_ms_;
  if (options_.terminal) bar_.draw(report);
  if (step.step % options_.every != 0 && step.step != options_.num_steps) return;

  lines_.append(step_line(report));
  train_.add(report.step, report.loss);
  if (events_) {
    events_->scalar("train/loss", report.step, report.loss);
    events_->scalar("train/tokens_per_second", report.step, report.tokens_per_second);
    events_->scalar("train/loader_wait_ms", report.step, report.loader_wait_ms);
    events_->scalar("train/learning_rate", report.step, report.learning_rate);
    events_->scalar("train/grad_norm", report.step, report.grad_norm);
  }
  if (!options_.terminal) log_info("{}", progress_line(report, options_.num_steps));
  interval_steps_ = interval_tokens_ = 0;
  interval_ms_ = interval_wait_ms_ = 0;
}

void Metrics::evaluation(std::int64_t step, const std::string& split,
                         const Evaluation& evaluation) {
  lines_.append(evaluation_line(step, split, evaluation));
  held_out_.add(step, evaluation.loss);
  if (events_) {
    events_->scalar(split + "/loss", step, evaluation.loss);
    events_->scalar(split + "/bits_per_byte", step, evaluation.bits_per_byte);
  }
  write_svg();
  clear_bar();
  log_info("step {}: {} loss {:.4f}, {:.4f} bits per byte", step, split, evaluation.loss,
           evaluation.bits_per_byte);
}

void Metrics::clear_bar() { bar_.clear(); }

void Metrics::write_svg() {
  try {
    write_file_durably(options_.svg_path.string(),
                       loss_curve_svg("Loss curve", train_, held_out_, options_.split));
  } catch (const Error& error) {
    warn(
        fmt::format("{}; training goes on, and the picture is tried again after the next "
                    "evaluation",
                    error.what()));
  }
}

void Metrics::close() {
  clear_bar();
  write_svg();
  lines_.close();
  if (events_) events_->close();
}

}  // namespace birkhoff
