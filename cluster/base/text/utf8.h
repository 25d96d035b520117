// UTF-8 (RFC 3629: no surrogates, nothing beyond U+10FFFF, shortest form only).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace birkhoff {

// A code point and its bytes; bytes = 0 where the text at `position` is not valid.
struct Utf8Character {
  std::uint32_t code_point = 0;
  int bytes = 0;
};
Utf8Character utf8_at(std::string_view text, std::size_t position);

// Byte of the first invalid sequence, or npos.
std::size_t find_invalid_utf8(std::string_view text);

// Length of the text without the incomplete character it may end in, so that a longer text can be
// cut there. At most three bytes are left out; invalid bytes are not.
std::size_t complete_utf8(std::string_view text);

void append_utf8(std::uint32_t code_point, std::string& text);

}  // namespace birkhoff
