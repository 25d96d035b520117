// Tokenizers that prepare does not learn from its text: from a file, a corpus or a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace birkhoff {

// The location of the tokenizer of a corpus or a checkpoint.
struct TokenizerSource {
  std::string kind;       // bytes, chars, words, whitespace, sentencepiece
  std::string file = {};  // path of its vocabulary or model; empty for bytes
  std::int64_t vocabulary = 0;
  std::optional<std::int64_t> end_of_document = {};
};

// A tokenizer, as a corpus stores it.
struct KnownTokenizer {
  std::string kind;
  std::string content = {};     // of its file; empty for bytes
  std::int64_t vocabulary = 0;  // number of ids in the content, or in the source
  // The id that ends each of several documents. If unset, one id is added to the vocabulary, unless
  // the vocabulary is a source's.
  std::optional<std::int64_t> end_of_document = {};
  bool is_source = false;

  bool operator==(const KnownTokenizer&) const = default;
};

// Of chars, words or whitespace. content: of an undamaged vocabulary file.
KnownTokenizer vocabulary_tokenizer(const std::string& kind, std::string content);

// Reads a vocabulary of chars, words or whitespace, or a SentencePiece model; its first bytes
// decide which. Anything else: Error(kData).
KnownTokenizer read_tokenizer(const std::string& file);
KnownTokenizer read_tokenizer(const TokenizerSource& source);

KnownTokenizer sentencepiece_tokenizer(std::string content, const std::string& file);

// The file name of a tokenizer in a corpus folder: "tokenizer.chars" and so on. Not for bytes.
std::string tokenizer_file_name(const std::string& kind);

}  // namespace birkhoff
