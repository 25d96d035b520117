// Shared parts of the tokenizers: the size limit of their files, and decoding piece by piece.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

inline constexpr std::int64_t kTokenizerMaxBytes = 64 << 20;

// Ids [0, num_pieces) have pieces of text. An id after them, if the vocabulary has one, is the
// end-of-document mark of the corpus and has no text.
class PieceTokenizer : public Tokenizer {
 public:
  // vocabulary: num_pieces or one more; anything else is an Error(kData) that names `file`.
  PieceTokenizer(const std::string& file, std::int64_t num_pieces, std::int64_t vocabulary);
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::string decode(const std::vector<std::int32_t>& ids) const override;
  std::optional<std::string> text_of(std::int32_t id) const override;

 protected:
  virtual std::string decode_pieces(const std::vector<std::int32_t>& ids) const = 0;
  // text_of() an id below num_pieces.
  virtual std::optional<std::string> piece(std::int32_t id) const = 0;

 private:
  std::int64_t num_pieces_, vocabulary_;
};

// One function per kind. content: the content of the file. file: its name in messages.
std::unique_ptr<Tokenizer> make_byte_tokenizer(std::int64_t vocabulary);
std::unique_ptr<Tokenizer> make_char_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary);
// Of words or whitespace; the first line of the content says which.
std::unique_ptr<Tokenizer> make_word_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary);

}  // namespace birkhoff
