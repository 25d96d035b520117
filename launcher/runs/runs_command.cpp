#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "cluster/base/error.h"
#include "launcher/commands.h"
#include "launcher/failure.h"
#include "launcher/runs/run_summary.h"
#include "launcher/runs/text_table.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr int kDeepest = 8;  // levels below the folder that the user names

// Finds the run folders in a folder and below it. Does not search runs or folders whose names start
// with a dot, and does not follow links, except a link to a run that is not found otherwise.
class RunFinder {
 public:
  explicit RunFinder(std::ostream& err) : err_(err) {}

  std::vector<fs::path> find(const fs::path& folder) {
    visit(folder, 0);
    for (const fs::path& link : links_) add(link);
    return std::move(runs_);
  }

 private:
  void visit(const fs::path& folder, int depth) {
    if (is_run(folder)) return add(folder);
    if (depth == kDeepest) return;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
      std::error_code ignored;  // an entry that cannot be read is not a run folder
      if (entry->path().filename().string().starts_with('.')) continue;
      if (!entry->is_directory(ignored)) continue;
      if (!entry->is_symlink(ignored)) {
        visit(entry->path(), depth + 1);
      } else if (is_run(entry->path())) {
        links_.push_back(entry->path());
      }
    }
    if (error) {
      err_ << "birkhoff: warning: "
           << one_line(fmt::format("{}: cannot be read: {}", folder.string(), error.message()))
           << '\n';
    }
  }

  void add(const fs::path& run) {
    std::error_code gone;
    const fs::path real = fs::canonical(run, gone);
    if (!gone && seen_.insert(real).second) runs_.push_back(run.lexically_normal());
  }

  std::ostream& err_;
  std::vector<fs::path> runs_, links_;
  std::set<fs::path> seen_;
};

struct Row {
  fs::path folder;
  std::optional<RunSummary> run;  // absent if it is damaged: see `defect`
  std::string defect = {};
};

Row read_row(const fs::path& folder) {
  try {
    return {folder, read_run(folder)};
  } catch (...) {
    return {folder, std::nullopt, describe_failure(std::current_exception()).what};
  }
}

std::string local_minute(std::int64_t time) {
  return fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(static_cast<std::time_t>(time)));
}

std::vector<std::string> cells_of(const Row& row) {
  if (!row.run) {
    return {"damaged", "-", "-", "-", "-", "-", "-", "-", row.folder.string()};
  }
  const RunSummary& run = *row.run;
  const RunFigures figures = figures_of(run.records);
  return {state_name(run.state),
          fmt::format("{}/{}", run.step, run.config.train().steps()),
          loss_text(figures.last_step.loss),
          loss_text(figures.last_evaluation.loss),
          loss_text(figures.best_evaluation.loss),
          whole_text(figures.tokens_per_second),
          time_text(figures.seconds),
          local_minute(run.changed),
          row.folder.string()};
}

std::string json_of(const Row& row) {
  nlohmann::ordered_json object = {{"run", row.folder.string()}};
  if (!row.run) {
    object.update({{"state", "damaged"}, {"defect", row.defect}});
  } else {
    const RunFigures figures = figures_of(row.run->records);
    object.update({{"state", state_name(row.run->state)},
                   {"step", row.run->step},
                   {"steps", row.run->config.train().steps()},
                   {"loss", figures.last_step.loss},
                   {"evaluation_loss", figures.last_evaluation.loss},
                   {"best_evaluation_loss", figures.best_evaluation.loss},
                   {"tokens_per_second", figures.tokens_per_second},
                   {"step_ms", figures.step_ms},
                   {"seconds", figures.seconds},
                   {"changed", row.run->changed}});
  }
  // Names may contain any bytes.
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

int runs_command(const RunsArguments& arguments, std::ostream& out, std::ostream& err) {
  std::error_code error;
  if (!fs::is_directory(arguments.folder, error))
    fail(ExitCode::kUsage, "{}: no such folder", arguments.folder);
  std::vector<Row> rows;
  for (const fs::path& folder : RunFinder(err).find(arguments.folder)) {
    rows.push_back(read_row(folder));
    if (!rows.back().run) err << "birkhoff: warning: " << rows.back().defect << '\n';
  }
  if (rows.empty()) {
    fail(ExitCode::kUsage, "{}: no run folder (a folder with run.json) in it or below",
         arguments.folder);
  }
  // Newest first; damaged runs have no time and come last.
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    const std::int64_t time_a = a.run ? a.run->changed : -1, time_b = b.run ? b.run->changed : -1;
    return time_a != time_b ? time_a > time_b : a.folder < b.folder;
  });
  std::vector<std::vector<std::string>> cells;
  for (const Row& row : rows) {
    if (arguments.json) out << json_of(row) << '\n';
    cells.push_back(cells_of(row));
  }
  if (!arguments.json) {
    out << text_table({{"state"},
                       {"step", true},
                       {"train", true},
                       {"valid", true},
                       {"best", true},
                       {"tokens/s", true},
                       {"time", true},
                       {"changed"},
                       {"run"}},
                      cells);
  }
  return 0;
}

}  // namespace birkhoff
