#include "data/tokenizers/tokenizer.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  explicit ByteTokenizer(std::int64_t vocabulary) : Tokenizer("bytes tokenizer", 256, vocabulary) {}

  std::vector<std::int32_t> encode(std::string_view text, std::string*) const override {
    std::vector<std::int32_t> ids(text.size());
    for (std::size_t i = 0; i < text.size(); ++i) ids[i] = static_cast<unsigned char>(text[i]);
    return ids;
  }

  std::optional<char> byte_of(std::int32_t id) const override {
    return id < 256 ? std::optional(static_cast<char>(id)) : std::nullopt;
  }

 protected:
  std::string decode_pieces(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    for (const std::int32_t id : ids) text += static_cast<char>(id);
    return text;
  }
  std::optional<std::string> piece(std::int32_t id) const override {
    return std::string(1, static_cast<char>(id));
  }
};

}  // namespace

Tokenizer::Tokenizer(const std::string& file, std::int64_t num_pieces, std::int64_t vocabulary)
    : num_pieces_(num_pieces), vocabulary_(vocabulary) {
  if (vocabulary != num_pieces && vocabulary != num_pieces + 1) {
    fail(ExitCode::kData,
         "{}: holds {} ids, the corpus has a vocabulary of {}; use the file of that corpus", file,
         num_pieces, vocabulary);
  }
}

std::string Tokenizer::decode(const std::vector<std::int32_t>& ids) const {
  std::vector<std::int32_t> pieces;
  pieces.reserve(ids.size());
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= vocabulary_) {
      fail(ExitCode::kData,
           "id {} to decode is outside the vocabulary of {}; use the tokenizer that made the ids",
           id, vocabulary_);
    }
    if (id < num_pieces_) pieces.push_back(id);
  }
  return decode_pieces(pieces);
}

std::optional<std::string> Tokenizer::text_of(std::int32_t id) const {
  require(0 <= id && id < vocabulary_, "an id of the vocabulary");
  return id < num_pieces_ ? piece(id) : "";
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& kind, const std::string& content,
                                          const std::string& file, std::int64_t vocabulary) {
  if (kind == "bytes") return std::make_unique<ByteTokenizer>(vocabulary);
  if (kind == "chars") return make_char_tokenizer(content, file, vocabulary);
  if (kind == "words" || kind == "whitespace")
    return make_word_tokenizer(content, file, vocabulary);
  if (kind == "sentencepiece") {
    check_sentencepiece_model(content, file);  // the hashes of a forged folder match
    return make_sentencepiece_tokenizer(content, file, vocabulary);
  }
  fail(ExitCode::kData,
       "{}: tokenizer kind '{}' is not bytes, chars, words, whitespace or sentencepiece", file,
       kind);
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& kind,
                                          const std::filesystem::path& file,
                                          std::int64_t vocabulary) {
  const std::string path = file.string();
  const std::string content =
      kind == "bytes" ? "" : read_file(path, kTokenizerMaxBytes, ExitCode::kData);
  return make_tokenizer(kind, content, path, vocabulary);
}

}  // namespace birkhoff
