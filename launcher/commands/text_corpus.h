// Raw text as a corpus for a model that is there.
#pragma once

#include <filesystem>
#include <ostream>
#include <string>

#include "data/tokenizers/known_tokenizer.h"
#include "launcher/processes/scratch_folder.h"

namespace birkhoff {

// A corpus of all of a text in one split, in a folder that goes with this object and with the
// process.
class TextCorpus {
 public:
  static constexpr char kSplit[] = "train";

  // text: a file, a folder, or "-": standard input. Notes on the text go to err. Error(kData) if it
  // is too short to predict a token of it; other errors as prepare_corpus().
  TextCorpus(const TokenizerSource& tokenizer, const std::string& text, std::ostream& err);
  std::filesystem::path folder() const { return scratch_.path() / "corpus"; }

 private:
  ScratchFolder scratch_{"text"};
};

}  // namespace birkhoff
