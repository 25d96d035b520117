#include "runtime/reporting/metrics_reader.h"

#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"

namespace birkhoff {
namespace {

constexpr std::size_t kPieceBytes = 1 << 20;
constexpr std::size_t kLongestLine = 1 << 16;
constexpr double kMaxSteps = 1e15;  // exact in a double

struct Line {
  std::optional<double> step;
  bool is_evaluation = false;
  StepRecord figures;
  std::string split;
  FigureValues others;  // by their keys
};

// Reads a line of metrics: a JSON object whose values are numbers, strings without escapes, and
// null. A parser for all of JSON takes several times as long, and a long run has a million lines.
class LineParser {
 public:
  explicit LineParser(std::string_view text) : rest_(text) {}

  // Returns false if the text is not such an object.
  bool parse(Line& line) {
    if (!take('{')) return false;
    if (take('}')) return at_end();
    do {
      std::string_view key;
      if (!take_string(key) || !take(':') || !take_value(key, line)) return false;
    } while (take(','));
    return take('}') && at_end();
  }

 private:
  void skip_spaces() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\t' || rest_[0] == '\r')) {
      rest_.remove_prefix(1);
    }
  }

  bool at_end() {
    skip_spaces();
    return rest_.empty();
  }

  bool take(char wanted) {
    skip_spaces();
    if (rest_.empty() || rest_[0] != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }

  bool take_string(std::string_view& text) {
    if (!take('"')) return false;
    const std::size_t end = rest_.find_first_of("\"\\");
    if (end == std::string_view::npos || rest_[end] == '\\') return false;
    text = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return true;
  }

  bool take_number(double& value) {
    const std::size_t digits = rest_.starts_with('-') ? 1 : 0;
    if (rest_.size() <= digits || rest_[digits] < '0' || rest_[digits] > '9') return false;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc()) return false;
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return true;
  }

  bool take_value(std::string_view key, Line& line) {
    skip_spaces();
    if (rest_.starts_with('"')) {
      std::string_view text;
      if (!take_string(text)) return false;
      if (key == "split") {
        line.is_evaluation = true;
        line.split = text;
      }
      return true;
    }
    double value = kUnknown;
    if (rest_.starts_with("null")) {
      rest_.remove_prefix(4);
    } else if (!take_number(value)) {
      return false;
    }
    if (key == "step") {
      line.step = value;
    } else if (key == "loss") {
      line.figures.loss = value;
      line.figures.has_targets = true;
    } else if (key == "tokens") {
      line.figures.tokens = value;
    } else if (key == "tokens_per_second") {
      line.figures.tokens_per_second = value;
    } else if (key == "step_ms") {
      line.figures.step_ms = value;
    } else if (key == "elapsed_seconds") {
      line.figures.elapsed_seconds = value;
    } else if (line.is_evaluation && key != "bytes") {  // "split" comes before the figures
      line.others.emplace_back(key, value);
    }
    return true;
  }

  std::string_view rest_;
};

// Removes the records from `step` on.
template <typename Record>
void cut_from(std::int64_t step, std::vector<Record>& records) {
  while (!records.empty() && records.back().step >= step) records.pop_back();
}

// Returns false if the line is not a record.
bool add_line(std::string_view text, MetricsRecords& records) {
  Line line;
  if (!LineParser(text).parse(line) || !line.step) return false;
  const double step = *line.step;
  if (!(step >= 0 && step <= kMaxSteps && step == std::floor(step))) return false;
  line.figures.step = static_cast<std::int64_t>(step);
  cut_from(line.figures.step, records.evaluations);
  if (line.is_evaluation) {  // comes after its step's own record
    cut_from(line.figures.step + 1, records.steps);
    records.evaluations.push_back({line.figures.step, std::move(line.split), line.figures.loss,
                                   line.figures.tokens, line.figures.elapsed_seconds,
                                   model_figures(line.others)});
  } else {
    cut_from(line.figures.step, records.steps);
    records.steps.push_back(line.figures);
  }
  return true;
}

}  // namespace

MetricsRecords read_metrics(const std::filesystem::path& path) {
  MetricsRecords records;
  if (!path_exists(path.string())) return records;
  File file = File::open_for_read(path.string());
  std::string piece(kPieceBytes, '\0'), text;  // text: read, but not yet a whole line
  std::int64_t number = 1;                     // of the line that text begins with
  const auto refuse = [&] {
    fail(ExitCode::kStorage, "{}:{}: not a line of metrics; repair or remove the file",
         path.string(), number);
  };
  while (const std::size_t num_read = file.read_some(piece.data(), piece.size())) {
    text.append(piece, 0, num_read);
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      if (!add_line(std::string_view(text).substr(begin, end - begin), records)) refuse();
      ++number;
    }
    text.erase(0, begin);
    if (text.size() > kLongestLine) refuse();
  }
  return records;
}

}  // namespace birkhoff
