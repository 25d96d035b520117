// The resolved options of `prepare`: the kind of tokenizer, and the defaults that depend on it.
#pragma once

#include <string>

#include "data/prepare/prepare.h"

namespace birkhoff {

// kFile and kLike are known beforehand; they are not learned from the text.
enum class TokenizerKind { kBytes, kChars, kWords, kWhiteSpace, kSentencePiece, kFile, kLike };

// kLike if `like` is set; else the kind that `tokenizer` names; else kFile if it is the path of a
// file. Anything else: Error(kUsage).
TokenizerKind tokenizer_kind(const PrepareOptions& options);

// Checks the output folder, the paths and the fractions; returns the options with fractions of 0
// for splits that have their own paths. Error(kUsage).
PrepareOptions checked_paths(PrepareOptions options);

// Checks the options of text, too; returns them with the defaults filled in. Invalid options:
// Error(kUsage).
PrepareOptions checked_options(PrepareOptions options, TokenizerKind kind);

}  // namespace birkhoff
