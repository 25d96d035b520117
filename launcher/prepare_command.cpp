#include <unistd.h>

#include <fmt/core.h>

#include <ostream>

#include "cluster/base/plural.h"
#include "data/corpus.h"
#include "data/prepare.h"
#include "data/verify.h"
#include "launcher/commands.h"
#include "launcher/model_tokenizer.h"
#include "launcher/split_arguments.h"

namespace birkhoff {
namespace {

// One line that rewrites itself on a terminal, a line every five seconds elsewhere.
class ProgressLines {
 public:
  ProgressLines(std::ostream& err, bool terminal) : err_(err), terminal_(terminal) {}

  void show(const PrepareProgress& progress) {
    if (!terminal_ && progress.elapsed_seconds < next_line_seconds_) return;
    next_line_seconds_ = progress.elapsed_seconds + 5;
    std::string line = fmt::format("prepare: {}, {:.1f} MB", progress.phase,
                                   static_cast<double>(progress.done_bytes) / 1e6);
    if (progress.total_bytes > 0) {
      line += fmt::format(" of {:.1f} MB", static_cast<double>(progress.total_bytes) / 1e6);
    }
    if (progress.eta_seconds >= 0) line += fmt::format(", {:.0f} s left", progress.eta_seconds);
    if (terminal_) {
      err_ << '\r' << line << "\x1b[K";
      err_.flush();
      open_ = true;
    } else {
      err_ << line << '\n';
    }
  }

  void end() {
    if (open_) err_ << "\r\x1b[K";
  }

 private:
  std::ostream& err_;
  const bool terminal_;
  bool open_ = false;
  double next_line_seconds_ = 5;
};

}  // namespace

int prepare_command(const PrepareArguments& arguments, std::ostream& out, std::ostream& err) {
  PrepareOptions options;
  options.out = arguments.out;
  options.tokenizer = arguments.tokenizer;
  options.vocab_size = arguments.vocabulary;
  for (const std::string& note : set_texts(arguments.texts, options))
    err << "prepare: " << note << '\n';
  if (!arguments.like.empty()) options.like = tokenizer_source(arguments.like);
  ProgressLines lines(err, isatty(STDERR_FILENO) != 0);
  const PrepareResult result =
      prepare_corpus(options, [&lines](const PrepareProgress& progress) { lines.show(progress); });
  lines.end();
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
