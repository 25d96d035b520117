// Raw text as a corpus for an existing model.
#pragma once

#include <filesystem>
#include <ostream>
#include <string>

#include "data/tokenizers/known_tokenizer.h"
#include "launcher/processes/scratch_folder.h"

namespace birkhoff {

// A corpus that holds a whole text in one split. Its folder is removed with this object, or when
// the process ends.
class TextCorpus {
 public:
  static constexpr char kSplit[] = "train";

  // text: a file, a folder, or "-": standard input. Notes on the text go to err. Error(kData) if it
  // is too short to predict a token; other errors as in prepare_corpus().
  TextCorpus(const TokenizerSource& tokenizer, const std::string& text, std::ostream& err);
  std::filesystem::path folder() const { return scratch_.path() / "corpus"; }

 private:
  ScratchFolder scratch_{"text"};
};

}  // namespace birkhoff
