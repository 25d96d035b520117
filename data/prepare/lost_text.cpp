#include "data/prepare/lost_text.h"

#include <fmt/format.h>

#include <algorithm>

namespace birkhoff {

std::string lost_text(std::string_view text, std::string_view back) {
  std::string changes;
  const auto compare = [&](const char* what, const auto& counts) {
    const auto before = std::ranges::count_if(text, counts);
    const auto after = std::ranges::count_if(back, counts);
    if (before == after) return;
    changes += fmt::format("{}{} {} -> {}", changes.empty() ? "" : ", ", what, before, after);
  };
  compare("newlines", [](char c) { return c == '\n'; });
  compare("spaces", [](char c) { return c == ' '; });
  compare("capitals", [](char c) { return c >= 'A' && c <= 'Z'; });
  return changes.empty() ? "other characters" : changes;
}

}  // namespace birkhoff
