// Words as tokens: the splitting of text into words, their counts, their file, and (in the .cpp)
// the tokenizers `words` and `whitespace`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace birkhoff {

enum class WordRule {
  kAll,         // words: word_length() cuts the whole text
  kWhiteSpace,  // whitespace: runs of anything but ASCII white space, and each newline
};

// The number of bytes of the word at the start of a non-empty text. A word is a run of word
// characters (letters, digits, _, everything beyond ASCII; cut after 128 bytes) or any other single
// character, with one space before it if there is one. Each other white-space character is a word
// of its own. So the words of a text, concatenated, are the text.
std::size_t word_length(std::string_view text);

// Takes the first word off `text`, and any white space before it that is not a word; empty if no
// word is left.
std::string_view take_word(std::string_view& text, WordRule rule);

// Counts the words of the training split. To bound memory, it keeps at most kMaxDistinct different
// words: when there are more, it forgets the rarest (and counts them from zero if they come again).
class WordVocabulary {
 public:
  static constexpr std::size_t kMaxDistinct = 4 << 20;
  explicit WordVocabulary(WordRule rule, std::size_t max_distinct = kMaxDistinct)
      : rule_(rule), max_distinct_(max_distinct) {}
  void add(std::string_view text, bool training);
  // The vocabulary file of at most `most_ids` ids, the unknown id included: "birkhoff words 1", or
  // "birkhoff whitespace 1" and "unknown yes|no"; then one word per line, most frequent first
  // (ties: by bytes). Newline, carriage return and backslash are written \n, \r, \\. The unknown id
  // is 0 in words; in whitespace it follows all other ids, and exists only if some text has words
  // that the vocabulary lacks.
  std::string file_content(std::int64_t most_ids) const;

 private:
  WordRule rule_;
  std::unordered_map<std::string, std::int64_t> counts_;
  std::unordered_set<std::string> others_;  // whitespace: the words of other splits
  std::size_t max_distinct_;
  std::int64_t forget_below_ = 1;
};

}  // namespace birkhoff
