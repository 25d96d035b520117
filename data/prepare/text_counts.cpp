#include "data/prepare/text_counts.h"

namespace birkhoff {

void TextCounter::add(std::string_view text) {
  std::int64_t characters = 0, words = 0, sentences = 0;
  bool in_word = in_word_, line_has_word = line_has_word_;
  for (const char c : text) {
    characters += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
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

}  // namespace birkhoff
