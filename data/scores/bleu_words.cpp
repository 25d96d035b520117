#include "data/scores/bleu_words.h"

#include "cluster/base/error.h"
#include "cluster/base/text/utf8.h"
#include "data/scores/unicode_classes.h"

namespace birkhoff {
namespace {

using CodePoints = std::u32string;

bool is_unicode_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

CodePoints code_points(std::string_view text) {
  CodePoints points;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Character c = utf8_at(text, i);
    if (c.bytes == 0) fail(ExitCode::kData, "byte {} of the line is not UTF-8", i);
    points += static_cast<char32_t>(c.code_point);
    i += static_cast<std::size_t>(c.bytes);
  }
  return points;
}

void replace_all(CodePoints& text, std::u32string_view from, std::u32string_view to) {
  for (std::size_t i = 0; (i = text.find(from, i)) != CodePoints::npos; i += to.size())
    text.replace(i, from.size(), to);
}

// Puts each character of a class between spaces.
template <typename InClass>
void separate(CodePoints& text, InClass in_class) {
  CodePoints result;
  for (const char32_t c : text) {
    if (in_class(c)) {
      result += {U' ', c, U' '};
    } else {
      result += c;
    }
  }
  text = std::move(result);
}

// Where a character of one class precedes one of another, puts the first or the second of them
// between spaces. Pairs do not overlap: the leftmost counts.
enum class Separated { kFirst, kSecond };
template <typename IsFirst, typename IsSecond>
void separate_in_pairs(CodePoints& text, Separated separated, IsFirst is_first,
                       IsSecond is_second) {
  CodePoints result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (i + 1 == text.size() || !is_first(text[i]) || !is_second(text[i + 1])) {
      result += text[i];
      continue;
    }
    if (separated == Separated::kFirst) {
      result += {U' ', text[i], U' ', text[i + 1]};
    } else {
      result += {text[i], U' ', text[i + 1], U' '};
    }
    ++i;
  }
  text = std::move(result);
}

void separate_13a(CodePoints& text) {
  const auto is_digit = [](char32_t c) { return c >= U'0' && c <= U'9'; };
  const auto is_other = [&](char32_t c) { return !is_digit(c); };
  const auto is_period_or_comma = [](char32_t c) { return c == U'.' || c == U','; };
  replace_all(text, U"<skipped>", U"");
  replace_all(text, U"&quot;", U"\"");
  replace_all(text, U"&amp;", U"&");
  replace_all(text, U"&lt;", U"<");
  replace_all(text, U"&gt;", U">");
  text = U' ' + text + U' ';  // so that the first and the last character have neighbors
  separate(text, [](char32_t c) {
    return (c >= U'{' && c <= U'~') || (c >= U'[' && c <= U'`') || (c >= U' ' && c <= U'&') ||
           (c >= U'(' && c <= U'+') || (c >= U':' && c <= U'@') || c == U'/';
  });
  separate_in_pairs(text, Separated::kSecond, is_other, is_period_or_comma);
  separate_in_pairs(text, Separated::kFirst, is_period_or_comma, is_other);
  separate_in_pairs(text, Separated::kSecond, is_digit, [](char32_t c) { return c == U'-'; });
}

void separate_intl(CodePoints& text) {
  const auto is_other = [](char32_t c) { return !is_number(c); };
  separate_in_pairs(text, Separated::kSecond, is_other, is_punctuation);
  separate_in_pairs(text, Separated::kFirst, is_punctuation, is_other);
  separate(text, is_symbol);
}

}  // namespace

BleuTokenizer bleu_tokenizer(const std::string& name) {
  for (const auto tokenizer : {BleuTokenizer::kNone, BleuTokenizer::k13a, BleuTokenizer::kIntl}) {
    if (name == bleu_tokenizer_name(tokenizer)) return tokenizer;
  }
  fail(ExitCode::kUsage, "BLEU has no tokenizer '{}'; name 13a, intl or none", name);
}

std::string bleu_tokenizer_name(BleuTokenizer tokenizer) {
  switch (tokenizer) {
    case BleuTokenizer::k13a:
      return "13a";
    case BleuTokenizer::kIntl:
      return "intl";
    case BleuTokenizer::kNone:
      break;
  }
  return "none";
}

std::vector<std::string> bleu_words(std::string_view segment, BleuTokenizer tokenizer) {
  CodePoints text = code_points(segment);
  // White space at the end is no neighbor of the last character.
  while (!text.empty() && is_unicode_space(text.back())) text.pop_back();
  if (tokenizer == BleuTokenizer::k13a) separate_13a(text);
  if (tokenizer == BleuTokenizer::kIntl) separate_intl(text);
  std::vector<std::string> words;
  bool in_word = false;
  for (const char32_t c : text) {
    if (is_unicode_space(c)) {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    append_utf8(c, words.back());
  }
  return words;
}

}  // namespace birkhoff
