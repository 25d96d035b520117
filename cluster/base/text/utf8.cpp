#include "cluster/base/text/utf8.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// Bytes of the character that starts with this byte; 0 if no character can start with it.
int announced_bytes(unsigned char first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return 2;
  if (first >= 0xe0 && first <= 0xef) return 3;
  if (first >= 0xf0 && first <= 0xf4) return 4;
  return 0;
}

}  // namespace

Utf8Character utf8_at(std::string_view text, std::size_t position) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[position + i]); };
  const int bytes = announced_bytes(byte(0));
  if (bytes == 1) return {byte(0), 1};
  if (bytes == 0 || text.size() - position < static_cast<std::size_t>(bytes)) return {};
  std::uint32_t code_point = byte(0) & (0x7fu >> bytes);
  for (int i = 1; i < bytes; ++i) {
    if ((byte(static_cast<std::size_t>(i)) & 0xc0) != 0x80) return {};
    code_point = code_point << 6 | (byte(static_cast<std::size_t>(i)) & 0x3f);
  }
  constexpr std::array<std::uint32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
  if (code_point < kSmallest[static_cast<std::size_t>(bytes)] || code_point > 0x10ffff || surrogate)
    return {};
  return {code_point, bytes};
}

std::size_t find_invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    // Most text is ASCII: eight bytes at a time.
    std::uint64_t eight = 0;
    if (text.size() - i >= sizeof eight) {
      std::memcpy(&eight, text.data() + i, sizeof eight);
      if ((eight & 0x8080808080808080) == 0) {
        i += sizeof eight;
        continue;
      }
    }
    const int bytes = utf8_at(text, i).bytes;
    if (bytes == 0) return i;
    i += static_cast<std::size_t>(bytes);
  }
  return std::string_view::npos;
}

std::string with_replacements(std::string_view text) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const int bytes = utf8_at(text, at).bytes;
    if (bytes > 0) {
      result += text.substr(at, static_cast<std::size_t>(bytes));
    } else {
      append_utf8(0xfffd, result);
    }
    at += static_cast<std::size_t>(std::max(bytes, 1));
  }
  return result;
}

std::size_t complete_utf8(std::string_view text) {
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;  // a continuation: look for its first byte
    return announced_bytes(byte) > static_cast<int>(back) ? text.size() - back : text.size();
  }
  return text.size();
}

void append_utf8(std::uint32_t code_point, std::string& text) {
  require(code_point <= 0x10ffff, "code point");
  const int further = code_point < 0x80 ? 0 : code_point < 0x800 ? 1 : code_point < 0x10000 ? 2 : 3;
  constexpr std::array<std::uint32_t, 4> kMarks = {0, 0xc0, 0xe0, 0xf0};  // by `further` bytes
  text += static_cast<char>(kMarks[static_cast<std::size_t>(further)] | code_point >> 6 * further);
  for (int shift = 6 * (further - 1); shift >= 0; shift -= 6) {
    text += static_cast<char>(0x80 | (code_point >> shift & 0x3f));
  }
}

}  // namespace birkhoff
