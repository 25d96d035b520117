// What a tokenizer does not keep of a text.
#pragma once

#include <string>
#include <string_view>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

// Encodes and decodes the text. Empty if it comes back unchanged; else a sentence that says what is
// lost: "newlines 12 -> 0, spaces 90 -> 85, capitals 7 -> 0, unknown characters 0 -> 3".
std::string lost_text(const Tokenizer& tokenizer, std::string_view text);

}  // namespace birkhoff
