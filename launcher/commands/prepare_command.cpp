#include <fmt/core.h>

#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/prepare/prepare.h"
#include "launcher/commands.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"

namespace birkhoff {
namespace {

constexpr double kMaxHeldOut = 0.9;

bool names_something(const std::string& path) {
  std::error_code ignored;
  return path == "-" || std::filesystem::exists(path, ignored);
}

// The values of --valid or --test: one fraction, or paths.
class HeldOut {
 public:
  HeldOut(std::string option, double& fraction, std::vector<std::string>& paths)
      : option_(std::move(option)), fraction_(fraction), paths_(paths) {}

  const std::string& option() const { return option_; }
  bool has_paths() const { return !paths_.empty(); }

  // Returns false for a value after a fraction, which does not belong to the option.
  bool take(const std::string& value, std::vector<std::string>& notes) {
    const std::optional<double> number = parse_number<double>(value);
    if (!number) {
      if (is_given_) return false;
      if (!names_something(value)) {
        fail(ExitCode::kUsage,
             "{} {}: neither a fraction from 0 to {} nor an existing file or folder", option_,
             value, kMaxHeldOut);
      }
      paths_.push_back(value);
      return true;
    }
    if (is_given_ || has_paths()) {
      fail(ExitCode::kUsage,
           "{} {}: give one fraction or several paths, not both; a file of that name is ./{}",
           option_, value, value);
    }
    if (!(*number >= 0 && *number <= kMaxHeldOut)) {
      fail(ExitCode::kUsage, "{} {}: give a fraction from 0 to {}, or files and folders", option_,
           value, kMaxHeldOut);
    }
    if (names_something(value)) {
      notes.push_back(fmt::format("{} {} is read as a fraction; the file of that name is ./{}",
                                  option_, value, value));
    }
    fraction_ = *number;
    is_given_ = true;
    return true;
  }

 private:
  std::string option_;
  double& fraction_;
  std::vector<std::string>& paths_;
  bool is_given_ = false;  // the fraction
};

// Sets the paths and fractions in `options` from PATH, --train, --valid and --test together. A
// value of --valid or --test that reads as a number is a fraction, and the values after it are
// PATHs again. Error(kUsage) if values do not fit together. Returns notes about values that the
// user may have meant differently.
std::vector<std::string> set_texts(const std::vector<PrepareArguments::Text>& texts,
                                   PrepareOptions& options) {
  std::vector<std::string> notes, positional;
  HeldOut valid("--valid", options.valid_fraction, options.valid_paths);
  HeldOut test("--test", options.test_fraction, options.test_paths);
  for (const auto& [option, value] : texts) {
    if (option == "--train") {
      options.paths.push_back(value);
      continue;
    }
    const bool taken = (option == valid.option() && valid.take(value, notes)) ||
                       (option == test.option() && test.take(value, notes));
    if (!taken) positional.push_back(value);
  }
  if (positional.empty()) {
    if (options.paths.empty() && (valid.has_paths() || test.has_paths()))
      fail(ExitCode::kUsage, "--train is required if --valid or --test name texts");
    return notes;
  }
  if (!options.paths.empty() || valid.has_paths() || test.has_paths()) {
    fail(ExitCode::kUsage,
         "{}: if --train, --valid or --test name texts, each text needs one of these options; put "
         "it after one",
         positional.front());
  }
  options.paths = std::move(positional);
  return notes;
}

std::string progress_line(const PrepareProgress& progress) {
  std::string line = fmt::format("prepare: {}, {:.1f} MB", progress.phase,
                                 static_cast<double>(progress.done_bytes) / 1e6);
  if (progress.total_bytes > 0) {
    line += fmt::format(" of {:.1f} MB", static_cast<double>(progress.total_bytes) / 1e6);
  }
  if (progress.eta_seconds >= 0) line += fmt::format(", {:.0f} s left", progress.eta_seconds);
  return line;
}

std::optional<TableColumns> table_columns(const PrepareArguments& arguments) {
  const std::optional<std::string>&text = arguments.text_column, &label = arguments.label_column;
  if (text && label) return TableColumns{*text, *label, arguments.header};
  if (text || label) {
    fail(ExitCode::kUsage, "{} is given without {}; tables need both, plain text neither",
         text ? "--text-column" : "--label-column", text ? "--label-column" : "--text-column");
  }
  if (arguments.header)
    fail(ExitCode::kUsage, "--header is for tables; give --text-column and --label-column, too");
  return std::nullopt;
}

// The parser accepts one of the three.
TextFormat text_format(const PrepareArguments& arguments) {
  if (arguments.lines) return {.kind = TextFormat::kLines};
  if (arguments.separator) return {.kind = TextFormat::kSeparator, .name = *arguments.separator};
  if (arguments.jsonl) return {.kind = TextFormat::kJsonLines, .name = *arguments.jsonl};
  return {};
}

// Prepares the corpus and shows progress.
PrepareResult prepare_shown(const PrepareOptions& options, std::ostream& err) {
  ProgressLines lines(err);
  return prepare_corpus(
      options, [&lines](const PrepareProgress& progress) { lines.show(progress_line(progress)); });
}

}  // namespace

int prepare_command(const PrepareArguments& arguments, std::ostream& out, std::ostream& err) {
  PrepareOptions options;
  options.out = arguments.out;
  options.tokenizer = arguments.tokenizer;
  options.vocab_size = arguments.vocabulary;
  for (const std::string& note : set_texts(arguments.texts, options))
    err << "prepare: " << note << '\n';
  options.format = text_format(arguments);
  options.table = table_columns(arguments);
  if (!arguments.like.empty()) {
    options.like = tokenizer_source(arguments.like);
    if (options.table) options.class_names = class_names(arguments.like);
  }
  const PrepareResult result = prepare_shown(options, err);
  if (result.already_prepared)
    err << "prepare: " << arguments.out << " is already prepared from this input\n";
  if (result.empty_files > 0)
    err << "prepare: skipped " << counted(result.empty_files, "empty file") << '\n';
  if (result.not_regular > 0) {
    err << "prepare: skipped "
        << counted(result.not_regular, "link or special file", "links and special files") << '\n';
  }
  for (const std::string& note : result.notes) err << "prepare: " << note << '\n';
  out << describe_corpus(Corpus(arguments.out));
  return 0;
}

}  // namespace birkhoff
