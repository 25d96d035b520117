// What the options of `prepare` mean: the tokenizer's kind, and defaults that depend on it.
#pragma once

#include <string>

#include "data/prepare/prepare.h"

namespace birkhoff {

// kFile, kLike: known before.
enum class TokenizerKind { kBytes, kChars, kWords, kSentencePiece, kFile, kLike };

// `like`, or by the name of a built-in tokenizer, or the path of a file. None: Error(kUsage).
TokenizerKind tokenizer_kind(const PrepareOptions& options);

// Checks the options; returns them with the defaults filled in. Bad ones: Error(kUsage).
PrepareOptions checked_options(PrepareOptions options, TokenizerKind kind);

}  // namespace birkhoff
