#include "data/prepare/tokenizer_learner.h"

namespace birkhoff {

TokenizerLearner::TokenizerLearner(const TokenizerOptions& options, bool has_end_mark)
    : options_(options),
      has_end_mark_(has_end_mark),
      words_(options.kind == TokenizerKind::kWords ? WordRule::kAll : WordRule::kWhiteSpace),
      lines_(options.sample_bytes) {}

void TokenizerLearner::add(std::string_view text, SplitIndex split) {
  if (options_.kind == TokenizerKind::kChars) return chars_.add(text, split == kTrain);
  if (options_.kind != TokenizerKind::kSentencePiece) return words_.add(text, split == kTrain);
  if (split == kTrain) lines_.add(text);
}

KnownTokenizer TokenizerLearner::finish() {
  switch (options_.kind) {
    case TokenizerKind::kChars:
      return vocabulary_tokenizer(options_.name, chars_.file_content());
    case TokenizerKind::kWords:
    case TokenizerKind::kWhiteSpace:
      return vocabulary_tokenizer(
          options_.name, words_.file_content(options_.vocab_size - (has_end_mark_ ? 1 : 0)));
    default:
      return sentencepiece_tokenizer(train_sentencepiece(lines_.lines(), options_.vocab_size),
                                     "the trained model");
  }
}

}  // namespace birkhoff
