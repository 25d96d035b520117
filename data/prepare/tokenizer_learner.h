// The tokenizer that `prepare` learns from the text of the train split.
#pragma once

#include <string_view>

#include "data/prepare/input/documents.h"
#include "data/prepare/prepare_options.h"
#include "data/tokenizers/char_vocabulary.h"
#include "data/tokenizers/known_tokenizer.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "data/tokenizers/word_vocabulary.h"

namespace birkhoff {

class TokenizerLearner {
 public:
  // The tokenizer is of a kind that is learned. has_end_mark: the corpus adds one to it.
  TokenizerLearner(const TokenizerOptions& options, bool has_end_mark);
  // The next part of the text. The vocabulary comes from the train split; from the other splits,
  // only whether it lacks something.
  void add(std::string_view text, SplitIndex split);
  // Call once, after all text. SentencePiece trains then.
  KnownTokenizer finish();

 private:
  const TokenizerOptions& options_;
  const bool has_end_mark_;
  CharVocabulary chars_;
  WordVocabulary words_;
  LineSampler lines_;
};

}  // namespace birkhoff
