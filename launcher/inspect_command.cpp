#include <fmt/core.h>

#include <ostream>

#include "cluster/base/error.h"
#include "data/bigram.h"
#include "data/corpus.h"
#include "data/verify.h"
#include "launcher/commands.h"
#include "launcher/run_paths.h"
#include "models/describe.h"

namespace birkhoff {

int inspect_command(const InspectArguments& arguments, std::ostream& out, std::ostream&) {
  const PathKind kind = kind_of(arguments.path);
  if (kind != PathKind::kCorpus) {
    if (arguments.bigram)
      fail(ExitCode::kUsage, "--bigram is for a corpus, and {} is not one", arguments.path);
    const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
    const LoadedModel loaded = load_model(checkpoint, at::kCPU, ParameterValues::kAny);
    out << describe_checkpoint(checkpoint) << describe_model(*loaded.model);
    return 0;
  }
  const Corpus corpus(arguments.path);
  out << describe_corpus(corpus);
  if (arguments.bigram) {
    const BigramFigures figures = bigram_figures(corpus, "valid");
    out << fmt::format(
        "bigram model on valid: loss {:.4f} nats per token, {:.4f} bits per byte, {} tokens, {} "
        "bytes\n",
        figures.loss, figures.bits_per_byte, figures.tokens, figures.bytes);
  }
  return 0;
}

int verify_command(const std::string& path, std::ostream& out, std::ostream&) {
  if (kind_of(path) == PathKind::kCorpus) {
    verify_corpus(Corpus(path));
    out << path << ": corpus verified, every byte matches its hash\n";
    return 0;
  }
  for (const std::filesystem::path& folder : checkpoints_of(path)) {
    verify_checkpoint(open_checkpoint(folder));
    out << folder.string() << ": checkpoint verified, every byte matches its hash\n";
  }
  return 0;
}

}  // namespace birkhoff
