#include <fmt/core.h>

#include <optional>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/prepare/prepare.h"
#include "launcher/commands.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/commands/split_arguments.h"

namespace birkhoff {
namespace {

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
