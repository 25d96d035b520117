#include "data/tokenizers/word_vocabulary.h"

#include <algorithm>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/utf8.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {
namespace {

constexpr std::size_t kMaxWordBytes = 128;
constexpr char kHeader[] = "birkhoff words 1\n";
constexpr char kUnknown[] = " <unk>";

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

bool is_word_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

std::string escape(std::string_view word) {
  std::string line;
  for (const char c : word) {
    switch (c) {
      case '\n':
        line += "\\n";
        break;
      case '\r':
        line += "\\r";
        break;
      case '\\':
        line += "\\\\";
        break;
      default:
        line += c;
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
    if (line[i] == 'n') {
      word += '\n';
    } else if (line[i] == 'r') {
      word += '\r';
    } else if (line[i] == '\\') {
      word += '\\';
    } else {
      return {};
    }
  }
  return word;
}

class WordTokenizer final : public PieceTokenizer {
 public:
  WordTokenizer(std::vector<std::string> words, const std::string& file, std::int64_t vocabulary)
      : PieceTokenizer(file, static_cast<std::int64_t>(words.size()), vocabulary),
        words_(std::move(words)) {
    for (std::size_t id = 1; id < words_.size(); ++id) {
      const bool is_new = ids_.emplace(words_[id], static_cast<std::int32_t>(id)).second;
      if (!is_new)
        fail(ExitCode::kData, "{}:{}: the word is listed twice; use an undamaged vocabulary file",
             file, id + 1);
    }
  }

  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < text.size();) {
      const std::size_t length = word_length(text.substr(i));
      const auto found = ids_.find(text.substr(i, length));
      ids.push_back(found == ids_.end() ? 0 : found->second);
      i += length;
    }
    return ids;
  }

 protected:
  std::string decode_pieces(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    for (const std::int32_t id : ids) text += words_[static_cast<std::size_t>(id)];
    return text;
  }

 private:
  std::vector<std::string> words_;                          // by id, the unknown word first
  std::unordered_map<std::string_view, std::int32_t> ids_;  // views into words_
};

}  // namespace

std::size_t word_length(std::string_view text) {
  const bool joins = text[0] == ' ' && text.size() > 1 && !is_space(text[1]);
  const std::size_t begin = joins ? 1 : 0;
  if (!is_word_character(text[begin])) return begin + 1;
  std::size_t end = begin;
  while (end < text.size() && end - begin < kMaxWordBytes && is_word_character(text[end])) ++end;
  const std::size_t whole = complete_utf8(text.substr(begin, end - begin));
  return whole > 0 ? begin + whole : end;  // bytes that are not UTF-8 are words too
}

void WordVocabulary::add(std::string_view text) {
  std::string word;
  for (std::size_t i = 0; i < text.size(); i += word.size()) {
    word.assign(text.substr(i, word_length(text.substr(i))));
    ++counts_[word];
    while (counts_.size() > max_distinct_) {
      std::erase_if(counts_, [this](const auto& entry) { return entry.second <= forget_below_; });
      ++forget_below_;
    }
  }
}

std::string WordVocabulary::file_content(std::int64_t most_words) const {
  using Entry = std::pair<const std::string, std::int64_t>;
  std::vector<const Entry*> ranked;
  ranked.reserve(counts_.size());
  for (const Entry& entry : counts_) ranked.push_back(&entry);
  const std::size_t num_words =
      std::min(ranked.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, most_words)));
  const auto middle = ranked.begin() + static_cast<std::ptrdiff_t>(num_words);
  std::partial_sort(ranked.begin(), middle, ranked.end(), [](const Entry* a, const Entry* b) {
    return a->second != b->second ? a->second > b->second : a->first < b->first;
  });
  std::string content = kHeader;
  for (std::size_t i = 0; i < num_words; ++i) content += escape(ranked[i]->first) + "\n";
  return content;
}

std::unique_ptr<Tokenizer> make_word_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary) {
  if (content.rfind(kHeader, 0) != 0)
    fail(ExitCode::kData, "{}:1: not a vocabulary of words; use the corpus' file", file);
  std::vector<std::string> words = {kUnknown};
  for (std::size_t position = sizeof(kHeader) - 1; position < content.size();) {
    const std::size_t end = content.find('\n', position);
    const std::string word =
        end == std::string::npos
            ? std::string()
            : unescape(std::string_view(content).substr(position, end - position));
    if (word.empty()) {
      fail(ExitCode::kData,
           "{}:{}: a word and a line end expected; use an undamaged vocabulary file", file,
           words.size() + 1);
    }
    words.push_back(word);
    position = end + 1;
  }
  return std::make_unique<WordTokenizer>(std::move(words), file, vocabulary);
}

}  // namespace birkhoff
