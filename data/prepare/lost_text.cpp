#include "data/prepare/lost_text.h"

#include <fmt/format.h>

#include <algorithm>

namespace birkhoff {
namespace {

std::int64_t num_unknown(std::string_view text) {
  constexpr std::string_view kUnknown =
      "\xe2\x81\x87";  // U+2047: SentencePiece decodes <unk> to it
  std::int64_t count = 0;
  for (std::size_t at = text.find(kUnknown); at != std::string_view::npos;
       at = text.find(kUnknown, at + kUnknown.size())) {
    ++count;
  }
  return count;
}

}  // namespace

std::string lost_text(const Tokenizer& tokenizer, std::string_view text) {
  const std::string kept = tokenizer.decode(tokenizer.encode(text));
  if (kept == text) return "";
  std::string changes;
  const auto compare = [&](const char* what, const auto& count) {
    const std::int64_t before = count(text), after = count(kept);
    if (before == after) return;
    changes += fmt::format("{}{} {} -> {}", changes.empty() ? "" : ", ", what, before, after);
  };
  const auto of = [](char c) {
    return [c](std::string_view in) {
      return static_cast<std::int64_t>(std::count(in.begin(), in.end(), c));
    };
  };
  compare("newlines", of('\n'));
  compare("spaces", of(' '));
  compare("capitals", [](std::string_view in) {
    return static_cast<std::int64_t>(
        std::count_if(in.begin(), in.end(), [](char c) { return c >= 'A' && c <= 'Z'; }));
  });
  compare("unknown characters", num_unknown);
  return changes.empty() ? "other characters" : changes;
}

}  // namespace birkhoff
