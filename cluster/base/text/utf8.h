// UTF-8 (RFC 3629: no surrogates, nothing above U+10FFFF, shortest form only).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace birkhoff {

// A code point and its number of bytes. bytes is 0 if the text at `position` is not valid.
struct Utf8Character {
  std::uint32_t code_point = 0;
  int bytes = 0;
};
Utf8Character utf8_at(std::string_view text, std::size_t position);

// Offset of the first invalid sequence, or npos.
std::size_t find_invalid_utf8(std::string_view text);

// The text with U+FFFD in place of each byte that belongs to no character.
std::string with_replacements(std::string_view text);

// Length of the text without an incomplete character at its end, so that a longer text can be cut
// there. Leaves out at most three bytes, and no invalid ones.
std::size_t complete_utf8(std::string_view text);

// Whether the byte is not inside a character. In text that is not valid, bytes may count that begin
// none.
inline bool begins_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
}

// ASCII white space, which separates words.
inline bool is_white_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

void append_utf8(std::uint32_t code_point, std::string& text);

}  // namespace birkhoff
