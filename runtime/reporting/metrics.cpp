#include "runtime/reporting/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cluster/base/logging/log.h"
#include "cluster/base/text/number_text.h"
#include "runtime/reporting/metrics_reader.h"

namespace birkhoff {

namespace {

// JSON has no non-finite numbers: they become null.
template <typename Float>
std::string json_number(Float value) {
  return std::isfinite(value) ? plain_text(value) : "null";
}

// Times and rates: more digits mean nothing. The lines and the events carry the same values.
double rounded(double value) { return std::round(value * 1000) / 1000; }

// The end of a line: the model's figures.
std::string figures_text(const FigureValues& figures) {
  std::string text;
  for (const auto& [name, value] : figures) {
    text += fmt::format(",{}:{}", nlohmann::json(name).dump(), json_number(value));
  }
  return text;
}

void warn(const std::string& text) { log_warning("{}", text); }

}  // namespace

std::string step_line(const StepReport& report, double elapsed_seconds) {
  return fmt::format(
      "{{\"step\":{},{}\"tokens\":{},\"tokens_per_second\":{},\"step_ms\":{},"
      "\"loader_wait_ms\":{},\"learning_rate\":{},\"grad_norm\":{},\"elapsed_seconds\":{}{}}}\n",
      report.step, report.loss ? fmt::format("\"loss\":{},", json_number(*report.loss)) : "",
      report.tokens, json_number(rounded(report.tokens_per_second)),
      json_number(rounded(report.step_ms)), json_number(rounded(report.loader_wait_ms)),
      // Learning rates are floats in the configuration.
      json_number(static_cast<float>(report.learning_rate)), json_number(report.grad_norm),
      json_number(rounded(elapsed_seconds)), figures_text(report.figures));
}

std::string evaluation_line(std::int64_t step, const std::string& split,
                            const Evaluation& evaluation, double elapsed_seconds) {
  std::string of_task;
  for (const TaskFigure& figure : evaluation.task.figures)
    of_task += fmt::format("\"{}\":{},", figure.name, json_number(figure.value));
  of_task += fmt::format("\"tokens\":{}", evaluation.tokens);
  for (const TaskCount& count : evaluation.task.counts)
    of_task += fmt::format(",\"{}\":{}", count.name, count.value);
  return fmt::format("{{\"step\":{},\"split\":{},\"loss\":{},{},\"elapsed_seconds\":{}{}}}\n", step,
                     nlohmann::json(split).dump(), json_number(evaluation.loss), of_task,
                     json_number(rounded(elapsed_seconds)), figures_text(evaluation.figures));
}

Metrics::Metrics(MetricsOptions options)
    : options_(std::move(options)),
      bar_(stderr, options_.num_steps),
      lines_(File::open_for_append(options_.lines_path.string()), warn),
      began_(options_.clock()) {
  read_lines();
  if (!options_.event_folder.empty()) {
    events_.emplace(options_.event_folder, options_.first_step, warn);
  }
}

// Lines of earlier versions have no elapsed seconds: NaN, which fmax ignores.
void Metrics::read_lines() {
  const MetricsRecords records = read_metrics(options_.lines_path);
  for (const StepRecord& record : records.steps) {
    train_.add(record.step, record.loss);
    elapsed_before_ = std::fmax(elapsed_before_, record.elapsed_seconds);
  }
  for (const EvaluationRecord& record : records.evaluations) {
    if (record.split == options_.split) held_out_.add(record.step, record.loss);
    elapsed_before_ = std::fmax(elapsed_before_, record.elapsed_seconds);
  }
}

void Metrics::step(const StepReport& step, std::int64_t step_tokens) {
  const StepReport report = means_.add(step, step_tokens);
  num_tokens_ += step_tokens;
  if (step.loss) last_loss_ = step.loss;
  if (options_.terminal) bar_.draw(report);
  if (!is_line_due(step.step, options_.every, options_.num_steps)) return;

  lines_.append(step_line(report, elapsed_seconds()));
  if (report.loss) train_.add(report.step, *report.loss);
  if (events_) {
    if (report.loss) events_->scalar("train/loss", report.step, *report.loss);
    events_->scalar("train/tokens_per_second", report.step, rounded(report.tokens_per_second));
    events_->scalar("train/loader_wait_ms", report.step, rounded(report.loader_wait_ms));
    events_->scalar("train/learning_rate", report.step, report.learning_rate);
    events_->scalar("train/grad_norm", report.step, report.grad_norm);
    for (const auto& [name, value] : report.figures) {
      events_->scalar("train/" + name, report.step, value);
    }
  }
  const std::string line = progress_line(report, options_.num_steps);
  if (options_.terminal) {
    log_to_file(LogLevel::kInfo, line);
  } else {
    log_info("{}", line);
  }
  means_.restart();
}

void Metrics::evaluation(std::int64_t step, const std::string& split,
                         const Evaluation& evaluation) {
  lines_.append(evaluation_line(step, split, evaluation, elapsed_seconds()));
  last_held_out_loss_ = evaluation.loss;
  held_out_.add(step, evaluation.loss);
  if (events_) {
    events_->scalar(split + "/loss", step, evaluation.loss);
    for (const TaskFigure& figure : evaluation.task.figures)
      events_->scalar(split + "/" + figure.name, step, figure.value);
    for (const auto& [name, value] : evaluation.figures) {
      events_->scalar(split + "/" + name, step, value);
    }
  }
  write_svg();
  std::string text = fixed_text(evaluation.loss, 4);
  for (const TaskFigure& figure : evaluation.task.figures) text += ", " + figure.text;
  for (const auto& [name, value] : model_figures(evaluation.figures))
    text += fmt::format(", {} {}", name, fixed_text(value, 4));
  log_info("step {}: {} loss {}", step, split, text);
}

std::string Metrics::summary() const {
  const double seconds = options_.clock() - began_;
  std::string text;
  if (last_loss_) text += fmt::format("train loss {}, ", fixed_text(*last_loss_, 4));
  if (last_held_out_loss_) {
    text += fmt::format("{} loss {}, ", options_.split, fixed_text(*last_held_out_loss_, 4));
  }
  text += duration_text(elapsed_before_ + seconds);
  if (num_tokens_ > 0) {
    text += fmt::format(", {:.0f} tokens/s", static_cast<double>(num_tokens_) / seconds);
  }
  return text;
}

void Metrics::write_svg() {
  try {
    write_file_durably(options_.svg_path.string(),
                       loss_curve_svg(options_.run_name, train_, held_out_, options_.split));
  } catch (const Error& error) {
    warn(
        fmt::format("{}; training continues, and the picture is written again after the next "
                    "evaluation",
                    error.what()));
  }
}

void Metrics::close() {
  bar_.erase();
  write_svg();
  lines_.close();
  if (events_) events_->close();
}

}  // namespace birkhoff
