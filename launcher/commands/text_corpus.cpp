#include "launcher/commands/text_corpus.h"

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/corpus.h"
#include "data/prepare/prepare.h"

namespace birkhoff {

TextCorpus::TextCorpus(const TokenizerSource& tokenizer, const std::string& text,
                       std::ostream& err) {
  PrepareOptions options;
  options.out = folder().string();
  options.like = tokenizer;
  options.valid_fraction = 0;
  options.paths = {text};
  for (const std::string& note : prepare_corpus(options).notes) err << "birkhoff: " << note << '\n';
  const std::int64_t tokens = Corpus(folder()).split(kSplit).stream(0).elements();
  if (tokens < 2) {
    fail(ExitCode::kData, "--text {}: {}, too few to predict one; give more text", text,
         counted(tokens, "token"));
  }
}

}  // namespace birkhoff
