// The resolved options of `prepare`: the kind of tokenizer, and the defaults that depend on it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/prepare/prepare.h"

namespace birkhoff {

// kFile and kLike are known beforehand; they are not learned from the text.
enum class TokenizerKind { kBytes, kChars, kWords, kWhiteSpace, kSentencePiece, kFile, kLike };

// How a tokenizer is made, with the defaults filled in.
struct TokenizerOptions {
  TokenizerKind kind = TokenizerKind::kBytes;
  std::string name;                                                // as PrepareOptions::tokenizer
  std::optional<TokenizerSource> like;                             // of kLike
  std::int64_t vocab_size = 0, chunk_bytes = 0, sample_bytes = 0;  // as in PrepareOptions
};

// The tokenizer of the corpus and, if sources of pairs have one of their own, that. Invalid
// options: Error(kUsage).
std::vector<TokenizerOptions> tokenizer_options(const PrepareOptions& options);

// Checks the output folder, the paths and the fractions; returns the options with fractions of 0
// for splits that have their own paths. Error(kUsage).
PrepareOptions checked_paths(PrepareOptions options);

// Checks the options of text, too, but not of its tokenizers; returns them with the defaults filled
// in. Invalid options: Error(kUsage).
PrepareOptions checked_options(PrepareOptions options);

}  // namespace birkhoff
