// The tokenizer: converts text to ids and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace birkhoff {

// Ids [0, num_pieces) have pieces of text. An id after them, if the vocabulary has one, is the
// end-of-document mark of the corpus and has no text. Thread-safe after construction.
class Tokenizer {
 public:
  // vocabulary: num_pieces or one more; anything else is an Error(kData) that names `file`.
  Tokenizer(const std::string& file, std::int64_t num_pieces, std::int64_t vocabulary);
  virtual ~Tokenizer() = default;
  // The ids of a text, without an end-of-document mark. Characters or words outside the vocabulary
  // become the unknown id; `unknown_text`, unless null, gets the text of each, followed by
  // kEndOfUnknown. Text that the vocabulary cannot encode: Error(kData).
  virtual std::vector<std::int32_t> encode(std::string_view text,
                                           std::string* unknown_text) const = 0;
  std::vector<std::int32_t> encode(std::string_view text) const { return encode(text, nullptr); }
  static constexpr char kEndOfUnknown = '\xff';  // never in UTF-8
  // The text of ids. Marks and unknown ids become a visible replacement or nothing, never an error.
  // Ids outside [0, vocabulary): Error(kData).
  std::string decode(const std::vector<std::int32_t>& ids) const;
  // The byte that an id stands for, if it stands for a single arbitrary byte. A character may then
  // take several ids. (SentencePiece has such ids for characters that it has no piece for.)
  virtual std::optional<char> byte_of(std::int32_t) const { return std::nullopt; }
  // The text that an id in [0, vocabulary) stands for, wherever it occurs: nothing for marks, unset
  // for the unknown id.
  std::optional<std::string> text_of(std::int32_t id) const;
  // Whether the white space between tokens has no token: the text of the ids, concatenated, lacks
  // it.
  virtual bool drops_white_space() const { return false; }
  // Whether text may change otherwise, as SentencePiece's models decide.
  virtual bool may_change_text() const { return false; }
  std::int64_t vocabulary() const { return vocabulary_; }

 protected:
  virtual std::string decode_pieces(const std::vector<std::int32_t>& ids) const = 0;
  // text_of() an id below num_pieces.
  virtual std::optional<std::string> piece(std::int32_t id) const = 0;

 private:
  std::int64_t num_pieces_, vocabulary_;
};

// kind: bytes, chars, words, whitespace, sentencepiece; content: of the file of its vocabulary or
// model (unused for bytes), `file` in messages. Damaged content: Error(kData).
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& kind, const std::string& content,
                                          const std::string& file, std::int64_t vocabulary);
// The same from a file.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& kind,
                                          const std::filesystem::path& file,
                                          std::int64_t vocabulary);

}  // namespace birkhoff
