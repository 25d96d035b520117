#include <fmt/format.h>

#include <algorithm>
#include <ostream>
#include <set>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "configs/loader/summary.h"
#include "launcher/commands.h"
#include "launcher/runs/run_paths.h"
#include "launcher/runs/run_summary.h"
#include "launcher/runs/text_table.h"
#include "runtime/reporting/loss_curve.h"

namespace birkhoff {
namespace {

// Tables and plot show runs by number, because names may be long.
std::string picture_of(const std::vector<RunSummary>& runs) {
  constexpr std::size_t kColours = 7;  // beyond that, dashes distinguish lines
  std::vector<PlotLine> lines;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    Curve train, held_out;
    for (const StepRecord& record : runs[i].records.steps) train.add(record.step, record.loss);
    for (const EvaluationRecord& record : runs[i].records.evaluations) {
      held_out.add(record.step, record.loss);
    }
    const int colour = static_cast<int>(i);
    const std::string name = fmt::format("{}  {}", i + 1, runs[i].folder.string());
    lines.push_back(curve_line(train, false, "", colour));
    lines.push_back(curve_line(held_out, true, name, colour));
    for (std::size_t line = lines.size() - 2; line < lines.size(); ++line) {
      lines[line].dashed = i / kColours % 2 == 1;
    }
  }
  return plot_svg(loss_plot("Loss: dots are evaluations, thin lines are training", lines));
}

std::string figures_table(const std::vector<RunSummary>& runs) {
  std::vector<RunFigures> all;
  std::vector<std::string> names;  // of the metrics of any run
  for (const RunSummary& run : runs) {
    all.push_back(figures_of(run.records));
    for (const auto& [name, value] : all.back().last_evaluation.figures) {
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  }
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunFigures& figures = all[i];
    rows.push_back({fmt::format("{}", i + 1), state_name(runs[i].state),
                    fmt::format("{}/{}", runs[i].step, runs[i].config.train().steps()),
                    loss_text(figures.last_step.loss), loss_text(figures.last_evaluation.loss),
                    loss_text(figures.best_evaluation.loss)});
    for (const std::string& name : names) {
      const FigureValues& values = figures.last_evaluation.figures;
      const auto value = std::ranges::find(values, name, &FigureValues::value_type::first);
      rows.back().push_back(value == values.end() ? "-" : loss_text(value->second));
    }
    for (const std::string& text : {whole_text(figures.tokens_per_second),
                                    time_text(figures.seconds), runs[i].folder.string()}) {
      rows.back().push_back(text);
    }
  }
  std::vector<TableColumn> columns = {{"", true},      {"state"},       {"step", true},
                                      {"train", true}, {"valid", true}, {"best", true}};
  for (const std::string& name : names) columns.push_back({name, true});
  columns.insert(columns.end(), {{"tokens/s", true}, {"time", true}, {"run"}});
  return text_table(columns, rows);
}

std::string settings_table(const std::vector<RunSummary>& runs) {
  std::vector<configs::Config> configs;
  std::vector<TableColumn> columns = {{"setting"}};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    configs.push_back(runs[i].config);
    columns.push_back({fmt::format("{}", i + 1)});
  }
  std::vector<std::vector<std::string>> rows;
  for (const DifferingField& field : differing_fields(configs)) {
    rows.push_back({field.path});
    rows.back().insert(rows.back().end(), field.texts.begin(), field.texts.end());
  }
  return rows.empty() ? "all settings are equal\n" : text_table(columns, rows);
}

}  // namespace

int compare_command(const CompareArguments& arguments, std::ostream& out) {
  if (arguments.runs.size() < 2) {
    fail(ExitCode::kUsage,
         "compare needs at least two runs, {} is only one; `birkhoff inspect` describes it",
         arguments.runs[0]);
  }
  if (arguments.svg.empty()) fail(ExitCode::kUsage, "--svg '' names no file");
  std::set<std::filesystem::path> seen;
  std::vector<RunSummary> runs;
  for (const std::string& folder : arguments.runs) {
    if (kind_of(folder) != PathKind::kRun) {
      fail(ExitCode::kUsage, "{}: is not a run folder; compare takes run folders", folder);
    }
    if (!seen.insert(std::filesystem::canonical(folder)).second)
      fail(ExitCode::kUsage, "{}: is given twice; name each run once", folder);
    runs.push_back(read_run(folder));
  }
  write_file_durably(arguments.svg, picture_of(runs));
  out << figures_table(runs) << '\n'
      << settings_table(runs) << "\ncurves: " << arguments.svg << '\n';
  return 0;
}

}  // namespace birkhoff
