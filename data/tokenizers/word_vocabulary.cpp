#include "data/tokenizers/word_vocabulary.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/message_text.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {
namespace {

constexpr std::size_t kMaxWordBytes = 128;
constexpr std::string_view kWordsHeader = "birkhoff words 1\n";
constexpr std::string_view kWhiteSpaceHeader = "birkhoff whitespace 1\n";
constexpr std::string_view kHasUnknown = "unknown yes\n", kHasNone = "unknown no\n";

bool is_word_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// A backslash and the letter are written for the character.
struct Escape {
  char character, letter;
};
constexpr Escape kEscapes[] = {{'\n', 'n'}, {'\r', 'r'}, {'\\', '\\'}};

std::string escape(std::string_view word) {
  std::string line;
  for (const char c : word) {
    const auto* found = std::ranges::find(kEscapes, c, &Escape::character);
    if (found == std::end(kEscapes)) {
      line += c;
    } else {
      line += {'\\', found->letter};
    }
  }
  return line;
}

// The word of a line; empty if an escape is invalid.
std::string unescape(std::string_view line) {
  std::string word;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] != '\\') {
      word += line[i];
      continue;
    }
    if (++i == line.size()) return {};
    const auto* found = std::ranges::find(kEscapes, line[i], &Escape::letter);
    if (found == std::end(kEscapes)) return {};
    word += found->character;
  }
  return word;
}

class WordTokenizer final : public Tokenizer {
 public:
  // words: by id, including the text shown for the unknown word. unknown: its id; -1: there is
  // none. first_line: of the first word in the file.
  WordTokenizer(WordRule rule, std::vector<std::string> words, std::int32_t unknown,
                std::size_t first_line, const std::string& file, std::int64_t vocabulary)
      : Tokenizer(file, static_cast<std::int64_t>(words.size()), vocabulary),
        rule_(rule),
        words_(std::move(words)),
        unknown_(unknown) {
    std::size_t line = first_line;
    for (std::size_t id = 0; id < words_.size(); ++id) {
      if (static_cast<std::int32_t>(id) == unknown_) continue;
      const bool is_new = ids_.emplace(words_[id], static_cast<std::int32_t>(id)).second;
      if (!is_new)
        fail(ExitCode::kData, "{}:{}: the word is listed twice; use an undamaged vocabulary file",
             file, line);
      ++line;
    }
  }

  std::vector<std::int32_t> encode(std::string_view text,
                                   std::string* unknown_text) const override {
    std::vector<std::int32_t> ids;
    const std::string_view whole = text;
    for (std::string_view word; !(word = take_word(text, rule_)).empty();) {
      const auto found = ids_.find(word);
      const std::int32_t id = found == ids_.end() ? unknown_ : found->second;
      if (id < 0) {
        fail(ExitCode::kData,
             "word {} at byte {} is not among the {} words of the corpus; leave it out",
             quoted(std::string(word)), word.data() - whole.data(), words_.size());
      }
      if (id == unknown_ && unknown_text != nullptr) unknown_text->append(word) += kEndOfUnknown;
      ids.push_back(id);
    }
    return ids;
  }

  bool drops_white_space() const override { return rule_ == WordRule::kWhiteSpace; }

 protected:
  std::string decode_pieces(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      const std::string& word = words_[static_cast<std::size_t>(id)];
      const bool spaced = drops_white_space() && !text.empty() && text.back() != '\n';
      if (spaced && word != "\n") text += ' ';
      text += word;
    }
    return text;
  }
  std::optional<std::string> piece(std::int32_t id) const override {
    return id == unknown_ ? std::nullopt : std::optional(words_[static_cast<std::size_t>(id)]);
  }

 private:
  WordRule rule_;
  std::vector<std::string> words_;                          // by id
  std::unordered_map<std::string_view, std::int32_t> ids_;  // views into words_
  std::int32_t unknown_;
};

}  // namespace

std::size_t word_length(std::string_view text) {
  const bool joins = text[0] == ' ' && text.size() > 1 && !is_white_space(text[1]);
  const std::size_t begin = joins ? 1 : 0;
  if (!is_word_character(text[begin])) return begin + 1;
  std::size_t end = begin;
  while (end < text.size() && end - begin < kMaxWordBytes && is_word_character(text[end])) ++end;
  const std::size_t whole = complete_utf8(text.substr(begin, end - begin));
  return whole > 0 ? begin + whole : end;  // bytes that are not UTF-8 are words too
}

std::string_view take_word(std::string_view& text, WordRule rule) {
  std::size_t begin = 0, length = 0;
  if (rule == WordRule::kAll) {
    length = text.empty() ? 0 : word_length(text);
  } else {
    while (begin < text.size() && is_white_space(text[begin]) && text[begin] != '\n') ++begin;
    while (begin + length < text.size() && !is_white_space(text[begin + length])) ++length;
    if (length == 0 && begin < text.size()) length = 1;  // a newline
  }
  const std::string_view word = text.substr(begin, length);
  text.remove_prefix(begin + length);
  return word;
}

void WordVocabulary::add(std::string_view text, bool training) {
  if (!training && rule_ == WordRule::kAll) return;
  std::string word;
  for (std::string_view next; !(next = take_word(text, rule_)).empty();) {
    word.assign(next);
    if (!training) {
      if (others_.size() <= max_distinct_) others_.insert(word);
      continue;
    }
    ++counts_[word];
    while (counts_.size() > max_distinct_) {
      std::erase_if(counts_, [this](const auto& entry) { return entry.second <= forget_below_; });
      ++forget_below_;
    }
  }
}

std::string WordVocabulary::file_content(std::int64_t most_ids) const {
  using Entry = std::pair<const std::string, std::int64_t>;
  std::vector<const Entry*> ranked;
  ranked.reserve(counts_.size());
  for (const Entry& entry : counts_) ranked.push_back(&entry);
  const bool is_whitespace = rule_ == WordRule::kWhiteSpace;
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(1, most_ids));
  // Forgotten words, or too many to remember, count as words that the vocabulary lacks.
  const bool has_unknown =
      !is_whitespace || ranked.size() > most || forget_below_ > 1 ||
      others_.size() > max_distinct_ ||
      std::ranges::any_of(others_, [this](const auto& word) { return !counts_.contains(word); });
  const std::size_t num_words = std::min(ranked.size(), most - (has_unknown ? 1 : 0));
  const auto middle = ranked.begin() + static_cast<std::ptrdiff_t>(num_words);
  std::partial_sort(ranked.begin(), middle, ranked.end(), [](const Entry* a, const Entry* b) {
    return a->second != b->second ? a->second > b->second : a->first < b->first;
  });
  std::string content(is_whitespace ? kWhiteSpaceHeader : kWordsHeader);
  if (is_whitespace) content += has_unknown ? kHasUnknown : kHasNone;
  for (std::size_t i = 0; i < num_words; ++i) content += escape(ranked[i]->first) + "\n";
  return content;
}

std::unique_ptr<Tokenizer> make_word_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary) {
  const bool is_whitespace = content.starts_with(kWhiteSpaceHeader);
  if (!is_whitespace && !content.starts_with(kWordsHeader))
    fail(ExitCode::kData, "{}:1: not a vocabulary of words; use the corpus' file", file);
  std::size_t position = is_whitespace ? kWhiteSpaceHeader.size() : kWordsHeader.size();
  bool unknown_last = false;
  if (is_whitespace) {
    const auto rest = std::string_view(content).substr(position);
    unknown_last = rest.starts_with(kHasUnknown);
    if (!unknown_last && !rest.starts_with(kHasNone)) {
      fail(ExitCode::kData,
           "{}:2: 'unknown yes' or 'unknown no' expected; use an undamaged vocabulary file", file);
    }
    position += unknown_last ? kHasUnknown.size() : kHasNone.size();
  }
  const std::size_t first_line = is_whitespace ? 3 : 2;
  std::vector<std::string> words;
  if (!is_whitespace) words.emplace_back(" <unk>");
  for (std::size_t line = first_line; position < content.size(); ++line) {
    const std::size_t end = content.find('\n', position);
    const std::string word =
        end == std::string::npos
            ? std::string()
            : unescape(std::string_view(content).substr(position, end - position));
    if (word.empty()) {
      fail(ExitCode::kData,
           "{}:{}: a word and a line end expected; use an undamaged vocabulary file", file, line);
    }
    words.push_back(word);
    position = end + 1;
  }
  if (unknown_last) words.emplace_back("\ufffd");
  const auto last = static_cast<std::int32_t>(words.size()) - 1;
  const std::int32_t unknown = !is_whitespace ? 0 : unknown_last ? last : -1;
  return std::make_unique<WordTokenizer>(is_whitespace ? WordRule::kWhiteSpace : WordRule::kAll,
                                         std::move(words), unknown, first_line, file, vocabulary);
}

}  // namespace birkhoff
