#include <fmt/format.h>

#include <ostream>

#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/generate/generate.h"
#include "launcher/commands.h"
#include "launcher/commands/progress_lines.h"

namespace birkhoff {

int bench_corpus_command(const BenchCorpusArguments& arguments, std::ostream& out,
                         std::ostream& err) {
  ProgressLines lines(err);
  const bool made =
      generate_corpus({.out = arguments.out,
                       .name = arguments.name,
                       .scale = arguments.scale,
                       .seed = arguments.seed},
                      [&lines](const PrepareProgress& progress) {
                        lines.show(fmt::format("bench corpus: {:.1f} MB after {:.0f} s",
                                               static_cast<double>(progress.done_bytes) / 1e6,
                                               progress.elapsed_seconds));
                      });
  if (!made) err << "bench corpus: " << arguments.out << " already holds it\n";
  out << describe_corpus(Corpus(arguments.out));
  return 0;
}

}  // namespace birkhoff
