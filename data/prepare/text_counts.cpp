#include "data/prepare/text_counts.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "cluster/base/text/utf8.h"

namespace birkhoff {
namespace {

// The text of the tokens, one after another.
std::string text_of(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids,
                    std::string_view unknown) {
  std::string text;
  for (const std::int32_t id : ids) {
    if (const auto known = tokenizer.text_of(id)) {
      text += *known;
      continue;
    }
    const std::size_t end = unknown.find(Tokenizer::kEndOfUnknown);
    text += unknown.substr(0, end);
    unknown.remove_prefix(end + 1);
  }
  return text;
}

}  // namespace

void TextCounter::add(std::string_view text) {
  std::int64_t characters = 0, words = 0, sentences = 0;
  bool in_word = in_word_, line_has_word = line_has_word_;
  for (const char c : text) {
    characters += begins_character(c);
    const bool space = is_white_space(c);
    words += !space && !in_word;
    in_word = !space;
    if (c == '\n') {
      sentences += line_has_word;
      line_has_word = false;
    } else {
      line_has_word |= in_word;
    }
  }
  in_word_ = in_word;
  line_has_word_ = line_has_word;
  counts_.set_bytes(counts_.bytes() + static_cast<std::int64_t>(text.size()));
  counts_.set_characters(counts_.characters() + characters);
  counts_.set_words(counts_.words() + words);
  counts_.set_sentences(counts_.sentences() + sentences);
}

void TextCounter::end_document() {
  counts_.set_sentences(counts_.sentences() + (line_has_word_ ? 1 : 0));
  counts_.set_documents(counts_.documents() + 1);
  in_word_ = line_has_word_ = false;
}

std::optional<std::string> TextCounter::add_tokens(const Tokenizer& tokenizer,
                                                   std::string_view text,
                                                   const std::vector<std::int32_t>& ids,
                                                   const std::string& unknown) {
  const auto tokens = std::count(unknown.begin(), unknown.end(), Tokenizer::kEndOfUnknown);
  counts_.set_unknown_tokens(counts_.unknown_tokens() + tokens);
  counts_.set_unknown_bytes(counts_.unknown_bytes() + std::ssize(unknown) - tokens);
  counts_.set_changed_bytes(counts_.changed_bytes());  // 0 is written, too
  counts_.set_added_spaces(counts_.added_spaces());
  if (!tokenizer.may_change_text()) return std::nullopt;
  std::string back = text_of(tokenizer, ids, unknown);
  if (back == text) return std::nullopt;
  if (back.starts_with(' ') && std::string_view(back).substr(1) == text) {
    counts_.set_added_spaces(counts_.added_spaces() + 1);
    return std::nullopt;
  }
  counts_.set_changed_bytes(counts_.changed_bytes() + std::ssize(text));
  return back;
}

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
