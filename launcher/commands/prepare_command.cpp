#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "cluster/world.h"
#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/prepare/images/prepare_images.h"
#include "data/prepare/points/prepare_points.h"
#include "data/prepare/prepare.h"
#include "launcher/commands.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/processes/ranks.h"
#include "launcher/processes/supervisor.h"

namespace birkhoff {
namespace {

// What the input is, if it is not text.
using Records = std::variant<std::monostate, ImageOptions, PointOptions>;

bool makes_records(const PrepareArguments& arguments) {
  return arguments.images || arguments.points;
}

constexpr double kMaxHeldOut = 0.9;
constexpr std::int64_t kMaxSide = 8192;  // of resized images

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
  if (progress.bytes_per_second > 0)
    line += fmt::format(", {:.1f} MB/s", progress.bytes_per_second / 1e6);
  if (progress.eta_seconds >= 0) line += fmt::format(", {:.0f} s left", progress.eta_seconds);
  return line;
}

std::optional<TableColumns> table_columns(const PrepareArguments& arguments) {
  const std::optional<std::string>&text = arguments.text_column, &label = arguments.label_column;
  if (text && label) {
    const std::string second = arguments.second_column.value_or("");
    if (arguments.second_column && second.empty())
      fail(ExitCode::kUsage, "--second-column: must not be empty");
    return TableColumns{
        .text = *text, .label = *label, .header = arguments.header, .second = second};
  }
  if (text || label) {
    fail(ExitCode::kUsage, "{} is given without {}; tables need both, plain text neither",
         text ? "--text-column" : "--label-column", text ? "--label-column" : "--text-column");
  }
  if (arguments.header || arguments.second_column)
    fail(ExitCode::kUsage, "{} is for tables; give --text-column and --label-column, too",
         arguments.header ? "--header" : "--second-column");
  return std::nullopt;
}

// The parser accepts one of the three.
TextFormat text_format(const PrepareArguments& arguments) {
  if (arguments.lines) return {.kind = TextFormat::kLines};
  if (arguments.separator) return {.kind = TextFormat::kSeparator, .name = *arguments.separator};
  if (arguments.jsonl) return {.kind = TextFormat::kJsonLines, .name = *arguments.jsonl};
  return {};
}

// Of "64" or "48x64".
ImageSize image_size(const std::string& text) {
  const std::size_t cross = text.find('x');
  const auto rows = parse_number<std::int64_t>(std::string_view(text).substr(0, cross));
  const auto columns = cross == std::string::npos
                           ? rows
                           : parse_number<std::int64_t>(std::string_view(text).substr(cross + 1));
  const auto fits = [](const std::optional<std::int64_t>& side) {
    return side && *side >= 1 && *side <= kMaxSide;
  };
  if (!fits(rows) || !fits(columns)) {
    fail(ExitCode::kUsage, "--image-size {}: give a number of pixels from 1 to {}, or ROWSxCOLUMNS",
         text, kMaxSide);
  }
  return {*rows, *columns};
}

Records record_options(const PrepareArguments& arguments) {
  if (!makes_records(arguments)) {
    if (arguments.unlabeled || arguments.skip_damaged) {
      fail(ExitCode::kUsage, "{} needs --images or --points",
           arguments.unlabeled ? "--unlabeled" : "--skip-damaged");
    }
    return {};
  }
  const bool has_targets = !arguments.targets.empty() || !arguments.valid_targets.empty() ||
                           !arguments.test_targets.empty();
  if (arguments.text_column || arguments.label_column || arguments.vocabulary != 0 || has_targets ||
      !arguments.source_tokenizer.empty()) {
    fail(ExitCode::kUsage, "{} is for text; leave it out with {}",
         arguments.text_column                 ? "--text-column"
         : arguments.label_column              ? "--label-column"
         : has_targets                         ? "--target"
         : !arguments.source_tokenizer.empty() ? "--source-tokenizer"
                                               : "--vocab-size",
         arguments.images ? "--images" : "--points");
  }
  if (arguments.unlabeled && !arguments.like.empty()) {
    fail(ExitCode::kUsage,
         "--like {}: gives the classes of {}, but --unlabeled makes no labels; leave one out",
         arguments.like, arguments.images ? kImageNouns.rows : kPointNouns.rows);
  }
  const RecordOptions records{.labels = !arguments.unlabeled,
                              .skip_damaged = arguments.skip_damaged};
  if (arguments.points) return records;
  ImageOptions images{records, {}};
  if (!arguments.image_size.empty()) images.form.size = image_size(arguments.image_size);
  if (arguments.channels != 0) images.form.channels = arguments.channels;
  return images;
}

// Prints notes about the arguments.
PrepareOptions prepare_options(const PrepareArguments& arguments, std::ostream& err) {
  PrepareOptions options;
  options.out = arguments.out;
  options.tokenizer = arguments.tokenizer;
  options.vocab_size = arguments.vocabulary;
  for (const std::string& note : set_texts(arguments.texts, options))
    err << "prepare: " << note << '\n';
  options.format = text_format(arguments);
  options.table = table_columns(arguments);
  options.target_paths = arguments.targets;
  options.valid_target_paths = arguments.valid_targets;
  options.test_target_paths = arguments.test_targets;
  options.source_tokenizer = arguments.source_tokenizer;
  if (makes_records(arguments) && !arguments.like.empty()) {
    options.class_names = class_names(arguments.like);
    if (options.class_names.empty())
      fail(ExitCode::kUsage, "--like {}: has no classes; leave it out", arguments.like);
  } else if (!arguments.like.empty()) {
    options.like = tokenizer_source(arguments.like);
    if (options.has_pairs()) options.source_like = source_tokenizer_source(arguments.like);
    if (options.table) options.class_names = class_names(arguments.like);
  }
  return options;
}

// The command line of a rank. Each text has its option, so that none is taken for another one's.
std::vector<std::string> command_line(const PrepareArguments& arguments,
                                      const PrepareOptions& options) {
  std::vector<std::string> line = {"prepare"};
  line.insert(line.end(), arguments.for_ranks.begin(), arguments.for_ranks.end());
  const auto add = [&](const std::string& option, const std::vector<std::string>& values) {
    for (const std::string& value : values) line.push_back(option + "=" + value);
  };
  const auto add_held_out = [&](const std::string& option, const std::vector<std::string>& paths,
                                double fraction) {
    const bool is_given = std::any_of(arguments.texts.begin(), arguments.texts.end(),
                                      [&](const auto& text) { return text.option == option; });
    if (is_given) add(option, paths.empty() ? std::vector{fmt::format("{}", fraction)} : paths);
  };
  add("--train", options.paths);
  add_held_out("--valid", options.valid_paths, options.valid_fraction);
  add_held_out("--test", options.test_paths, options.test_fraction);
  return line;
}

// Prepares the corpus, shows progress, and describes the result.
void prepare_and_describe(const PrepareOptions& options, const Records& records,
                          ProcessGroup* ranks, const StopSignals* signals, std::ostream& out,
                          std::ostream& err) {
  const bool is_first = ranks == nullptr || ranks->rank() == 0;
  PrepareResult result;
  {
    std::optional<ProgressLines> lines;
    if (is_first) lines.emplace(err);
    const auto show = [&](const PrepareProgress& progress) {
      if (signals != nullptr && signals->received() != 0) {
        fail(ExitCode::kRequeue, "stopped on request; run the same command {}",
             std::holds_alternative<std::monostate>(records) ? "to start over" : "to continue");
      }
      if (lines) lines->show(progress_line(progress));
    };
    if (const auto* images = std::get_if<ImageOptions>(&records)) {
      result = prepare_images(options, *images, show, ranks);
    } else if (const auto* points = std::get_if<PointOptions>(&records)) {
      result = prepare_points(options, *points, show, ranks);
    } else {
      result = prepare_corpus(options, show, ranks);
    }
  }
  if (!is_first) return;
  if (result.already_prepared)
    err << "prepare: " << options.out << " is already prepared from this input\n";
  if (result.empty_files > 0)
    err << "prepare: skipped " << counted(result.empty_files, "empty file") << '\n';
  if (result.not_regular > 0) {
    err << "prepare: skipped "
        << counted(result.not_regular, "link or special file", "links and special files") << '\n';
  }
  for (const std::string& note : result.notes) err << "prepare: " << note << '\n';
  out << describe_corpus(Corpus(options.out));
}

// Makes a corpus that has no input.
int generate_and_describe(const PrepareArguments& arguments, std::ostream& out, std::ostream& err) {
  if (!arguments.texts.empty()) {
    fail(ExitCode::kUsage, "{} {}: --generate makes pairs without an input; leave it out",
         arguments.texts.front().option, arguments.texts.front().value);
  }
  if (ranks_to_run_on(std::nullopt) > 1) {
    fail(ExitCode::kUsage, "--generate: makes pairs in one process; start it without a launcher");
  }
  if (arguments.unlabeled || arguments.skip_damaged) {
    fail(ExitCode::kUsage, "{}: --generate makes pairs without an input; leave it out",
         arguments.unlabeled ? "--unlabeled" : "--skip-damaged");
  }
  GeneratedPairs pairs = arguments.generated;
  pairs.task = arguments.generate;
  if (!generate_pairs(arguments.out, pairs))
    err << "prepare: " << arguments.out << " already holds these pairs\n";
  out << describe_corpus(Corpus(arguments.out));
  return 0;
}

}  // namespace

int prepare_command(const PrepareArguments& arguments, std::ostream& out, std::ostream& err) {
  if (!arguments.generate.empty()) return generate_and_describe(arguments, out, err);
  const int ranks = ranks_to_run_on(arguments.ranks);
  Records records;
  PrepareOptions options;
  const auto check = [&] {
    records = record_options(arguments);
    // Of several ranks, only rank 0 prints notes; nor does the process that starts them.
    std::ostringstream unprinted;
    const bool prints = !arguments.ranks && (ranks == 1 || announced_rank() == 0);
    options = prepare_options(arguments, prints ? err : unprinted);
  };
  if (!arguments.ranks && ranks == 1) {
    check();
    prepare_and_describe(options, records, nullptr, nullptr, out, err);
    return 0;
  }
  StopSignals signals;
  check_before_ranks(check);
  if (arguments.ranks)
    return supervise({ranks}, {}, command_line(arguments, options), signals, err).code;
  return run_in_world(
      [&](World& world) {
        prepare_and_describe(options, records, &world.group(), &signals, out, err);
        return 0;
      },
      err);
}

}  // namespace birkhoff
