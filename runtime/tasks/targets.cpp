#include "runtime/tasks/targets.h"

#include <fmt/format.h>

#include <cmath>

#include "cluster/base/text/number_text.h"

namespace birkhoff {
TaskFigures TextTargets::figures(double nats) const {
  TaskFigures result;
  const auto bits = counts_.bits_per_byte(nats);
  if (!bits) return result;
  result.figures = {
      {"bits_per_byte", *bits, fmt::format("{} bits per byte", fixed_text(*bits, 4))}};
  result.counts = {{"bytes", counts_.bytes, fmt::format("{} bytes", counts_.bytes)}};
  return result;
}

TaskFigures TextTargets::details(double nats) const {
  TaskFigures result;
  const double perplexity = std::exp(nats / static_cast<double>(counts_.tokens));
  result.figures = {
      {"perplexity", perplexity, fmt::format("perplexity {:.5g} per token", perplexity)}};
  const double share =
      static_cast<double>(counts_.unknown_tokens) / static_cast<double>(counts_.tokens);
  result.counts = {
      {"unknown_tokens", counts_.unknown_tokens,
       fmt::format("{} of them unknown ({:.3g} %)", counts_.unknown_tokens, 100 * share)},
      {"unknown_bytes", counts_.unknown_bytes, ""}};
  if (const auto bits = counts_.bits_per_character(nats)) {
    result.figures.push_back(
        {"bits_per_character", *bits, fmt::format("{} bits per character", fixed_text(*bits, 4))});
    result.counts.push_back({"characters", counts_.characters, ""});
  }
  const auto word = counts_.word_perplexity(nats);
  if (!word) return result;
  const double word_and_line = *counts_.word_and_line_perplexity(nats);
  result.figures.push_back({"word_perplexity", *word, fmt::format("{:.5g} per word", *word)});
  result.figures.push_back({"word_and_line_perplexity", word_and_line,
                            fmt::format("{:.5g} per word and line end", word_and_line)});
  result.counts.push_back({"words", counts_.words, ""});
  result.counts.push_back({"line_ends", counts_.line_ends, ""});
  return result;
}

std::string TextTargets::withheld() const {
  if (counts_.no_bytes.empty() && counts_.no_words.empty()) return "";
  if (counts_.no_words.empty()) return "no bits per byte: " + counts_.no_bytes;
  return "no bits per byte and no perplexity per word: " + counts_.no_words;
}

}  // namespace birkhoff
