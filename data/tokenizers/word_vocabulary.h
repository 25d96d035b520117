// Words as tokens: how text is cut into words, their counts, their file, and (in the .cpp) the
// tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

namespace birkhoff {

// The number of bytes of the word at the start of a non-empty text. A word is a run of word
// characters (letters, digits, _, everything beyond ASCII; cut after 128 bytes) or any other single
// character, with one space before it if there is one. Each other white-space character is a word
// of its own. So the words of a text, concatenated, are the text.
std::size_t word_length(std::string_view text);

// Counts the words of the training split. To bound memory, it keeps at most kMaxDistinct different
// words: when there are more, it forgets the rarest (and counts them from zero if they come again).
class WordVocabulary {
 public:
  static constexpr std::size_t kMaxDistinct = 4 << 20;
  explicit WordVocabulary(std::size_t max_distinct = kMaxDistinct) : max_distinct_(max_distinct) {}
  void add(std::string_view text);
  // The vocabulary file: "birkhoff words 1", then one word per line, most frequent first (ties: by
  // bytes), at most `most_words`. Newline, carriage return and backslash are written \n, \r, \\. Id
  // 0 is the unknown word; line i + 2 is id i + 1.
  std::string file_content(std::int64_t most_words) const;

 private:
  std::unordered_map<std::string, std::int64_t> counts_;
  std::size_t max_distinct_;
  std::int64_t forget_below_ = 1;
};

}  // namespace birkhoff
