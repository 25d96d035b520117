// Classes of characters that tokenizers of translation scores separate: the general categories P,
// N and S of the Unicode database.
#pragma once

#include <cstdint>

namespace birkhoff {

// Of a code point. Characters that the database (its version: unicode_classes.cpp) does not know
// are in no class.
bool is_punctuation(std::uint32_t c);
bool is_number(std::uint32_t c);
bool is_symbol(std::uint32_t c);

}  // namespace birkhoff
