#include "data/tokenizers/char_vocabulary.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/message_text.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {
namespace {

constexpr std::uint32_t kReplacement = 0xfffd;

class CharTokenizer final : public Tokenizer {
 public:
  CharTokenizer(std::vector<std::uint32_t> code_points, bool has_unknown, const std::string& file,
                std::int64_t vocabulary)
      : Tokenizer(file, static_cast<std::int64_t>(code_points.size()) + (has_unknown ? 1 : 0),
                  vocabulary),
        code_points_(std::move(code_points)),
        ids_(0x110000, has_unknown ? static_cast<std::int32_t>(code_points_.size()) : -1) {
    for (std::size_t id = 0; id < code_points_.size(); ++id)
      ids_[code_points_[id]] = static_cast<std::int32_t>(id);
  }

  std::vector<std::int32_t> encode(std::string_view text,
                                   std::string* unknown_text) const override {
    std::vector<std::int32_t> ids;
    ids.reserve(text.size());
    for (std::size_t i = 0; i < text.size();) {
      const Utf8Character character = utf8_at(text, i);
      if (character.bytes == 0)
        fail(ExitCode::kData,
             "byte {} of the text is not UTF-8; convert it, or use bytes as tokens", i);
      const std::int32_t id = ids_[character.code_point];
      if (id < 0) {
        fail(ExitCode::kData,
             "character {} (U+{:04X}) at byte {} is not among the {} characters of the corpus; "
             "leave it out",
             quoted(std::string(text.substr(i, static_cast<std::size_t>(character.bytes)))),
             character.code_point, i, code_points_.size());
      }
      const auto bytes = static_cast<std::size_t>(character.bytes);
      if (unknown_text != nullptr && static_cast<std::size_t>(id) == code_points_.size()) {
        unknown_text->append(text.substr(i, bytes)) += kEndOfUnknown;
      }
      ids.push_back(id);
      i += bytes;
    }
    return ids;
  }

 protected:
  std::string decode_pieces(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      const auto slot = static_cast<std::size_t>(id);
      append_utf8(slot < code_points_.size() ? code_points_[slot] : kReplacement, text);
    }
    return text;
  }
  std::optional<std::string> piece(std::int32_t id) const override {
    const auto slot = static_cast<std::size_t>(id);
    if (slot == code_points_.size()) return std::nullopt;
    std::string text;
    append_utf8(code_points_[slot], text);
    return text;
  }

 private:
  std::vector<std::uint32_t> code_points_;
  std::vector<std::int32_t> ids_;  // by code point
};

}  // namespace

void CharVocabulary::add(std::string_view text, bool training) {
  std::vector<bool>& seen = training ? training_ : other_;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Character character = utf8_at(text, i);
    require(character.bytes > 0, "valid UTF-8");
    seen[character.code_point] = true;
    i += static_cast<std::size_t>(character.bytes);
  }
}

bool CharVocabulary::has_unknown() const {
  for (std::size_t c = 0; c < other_.size(); ++c) {
    if (other_[c] && !training_[c]) return true;
  }
  return false;
}

std::string CharVocabulary::file_content() const {
  std::string content = fmt::format("birkhoff chars 1\nunknown {}\n", has_unknown() ? "yes" : "no");
  for (std::size_t c = 0; c < training_.size(); ++c) {
    if (training_[c]) content += fmt::format("{:x}\n", c);
  }
  return content;
}

std::unique_ptr<Tokenizer> make_char_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary) {
  std::size_t position = 0;
  int line_number = 0;
  const auto next_line = [&] {
    const std::size_t end = content.find('\n', position);
    ++line_number;
    if (end == std::string::npos)
      fail(ExitCode::kData, "{}:{}: the line has no end; use an undamaged vocabulary file", file,
           line_number);
    const std::string line = content.substr(position, end - position);
    position = end + 1;
    return line;
  };
  if (next_line() != "birkhoff chars 1")
    fail(ExitCode::kData, "{}:1: not a vocabulary of characters; use the corpus' file", file);
  const std::string unknown = next_line();
  if (unknown != "unknown yes" && unknown != "unknown no") {
    fail(ExitCode::kData,
         "{}:2: 'unknown yes' or 'unknown no' expected; use an undamaged vocabulary file", file);
  }
  std::vector<std::uint32_t> code_points;
  while (position < content.size()) {
    // The maximum, which is no character, if the line is no number.
    const auto code_point = parse_number<std::uint32_t>(next_line(), 16).value_or(UINT32_MAX);
    const bool ascending = code_points.empty() || code_points.back() < code_point;
    const bool character = code_point <= 0x10ffff && (code_point < 0xd800 || code_point > 0xdfff);
    if (!character || !ascending) {
      fail(ExitCode::kData,
           "{}:{}: an ascending hexadecimal code point expected; use an undamaged vocabulary file",
           file, line_number);
    }
    code_points.push_back(code_point);
  }
  return std::make_unique<CharTokenizer>(std::move(code_points), unknown == "unknown yes", file,
                                         vocabulary);
}

}  // namespace birkhoff
