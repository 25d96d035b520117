#include "runtime/reporting/display_text.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "cluster/base/text/utf8.h"

namespace birkhoff {
namespace {

using Range = std::pair<std::uint32_t, std::uint32_t>;  // first and last code point

// C0 and C1 controls, zero-width and line marks, marks that reorder text, and characters that XML
// forbids.
constexpr std::array kUnshown = {
    Range{0x00, 0x1f},     Range{0x7f, 0x9f},     Range{0x200b, 0x200f}, Range{0x2028, 0x202e},
    Range{0x2060, 0x206f}, Range{0xfeff, 0xfeff}, Range{0xfff9, 0xfffb}, Range{0xfffe, 0xffff}};

// The common blocks of combining marks.
constexpr std::array kJoining = {Range{0x300, 0x36f},   Range{0x1ab0, 0x1aff},
                                 Range{0x1dc0, 0x1dff}, Range{0x20d0, 0x20ff},
                                 Range{0xfe00, 0xfe0f}, Range{0xfe20, 0xfe2f}};

// Blocks whose characters are wide (Unicode Standard Annex 11).
constexpr std::array kWide = {
    Range{0x1100, 0x115f},   Range{0x2e80, 0x303e},   Range{0x3041, 0x33ff},
    Range{0x3400, 0x4dbf},   Range{0x4e00, 0x9fff},   Range{0xa000, 0xa4cf},
    Range{0xac00, 0xd7a3},   Range{0xf900, 0xfaff},   Range{0xfe30, 0xfe4f},
    Range{0xff00, 0xff60},   Range{0xffe0, 0xffe6},   Range{0x1f300, 0x1f64f},
    Range{0x1f680, 0x1f6ff}, Range{0x1f900, 0x1f9ff}, Range{0x20000, 0x3fffd}};

template <std::size_t kSize>
bool holds(const std::array<Range, kSize>& ranges, std::uint32_t code_point) {
  return std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
    return code_point >= range.first && code_point <= range.second;
  });
}

struct Character {
  std::string text;
  int columns = 1;
};

std::vector<Character> characters_of(std::string_view text) {
  std::vector<Character> characters;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Character found = utf8_at(text, i);
    if (found.bytes == 0 || holds(kUnshown, found.code_point)) {
      characters.push_back({"?", 1});
    } else {
      const int columns = holds(kJoining, found.code_point) ? 0
                          : holds(kWide, found.code_point)  ? 2
                                                            : 1;
      characters.push_back(
          {std::string(text.substr(i, static_cast<std::size_t>(found.bytes))), columns});
    }
    i += static_cast<std::size_t>(std::max(found.bytes, 1));
  }
  return characters;
}

}  // namespace

std::string display_text(std::string_view text) {
  std::string shown;
  for (const Character& character : characters_of(text)) shown += character.text;
  return shown;
}

int display_columns(std::string_view text) {
  int columns = 0;
  for (const Character& character : characters_of(text)) columns += character.columns;
  return columns;
}

std::string last_columns(std::string_view text, int columns) {
  if (display_columns(text) <= columns) return display_text(text);
  const std::vector<Character> characters = characters_of(text);
  auto first = characters.end();
  int left = columns - 3;
  while (first != characters.begin() && (first - 1)->columns <= left) {
    --first;
    left -= first->columns;
  }
  std::string shown = "...";
  for (; first != characters.end(); ++first) shown += first->text;
  return shown;
}

}  // namespace birkhoff
