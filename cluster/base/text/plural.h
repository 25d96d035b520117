// Numbers with their nouns, for messages: "1 document", "2 documents", "0 entries".
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace birkhoff {

// n and the noun, in the singular or plural as n requires. `plural` is for nouns that take more
// than an s.
inline std::string counted(std::int64_t n, std::string_view noun, std::string_view plural = {}) {
  if (n == 1) return fmt::format("1 {}", noun);
  return plural.empty() ? fmt::format("{} {}s", n, noun) : fmt::format("{} {}", n, plural);
}

}  // namespace birkhoff
