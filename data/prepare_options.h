// What the options of `prepare` mean: the tokenizer's kind, and defaults that depend on it.
#pragma once

#include <string>

#include "data/prepare.h"

namespace birkhoff {

enum class TokenizerKind { kBytes, kChars, kWords, kSentencePiece, kModelFile };

// By the name of a built-in tokenizer, or the path of a model's file. Neither: Error(kUsage).
TokenizerKind tokenizer_kind(const std::string& tokenizer);

// Checks the options; returns them with the defaults filled in. Bad ones: Error(kUsage).
PrepareOptions checked_options(PrepareOptions options, TokenizerKind kind);

}  // namespace birkhoff
