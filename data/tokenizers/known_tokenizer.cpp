#include "data/tokenizers/known_tokenizer.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {

KnownTokenizer sentencepiece_tokenizer(std::string content, const std::string& file) {
  const SentencePieceModel model = check_sentencepiece_model(content, file);
  KnownTokenizer tokenizer{
      .kind = "sentencepiece", .content = std::move(content), .vocabulary = model.num_pieces};
  if (model.end_of_document >= 0) tokenizer.end_of_document = model.end_of_document;
  return tokenizer;
}

KnownTokenizer vocabulary_tokenizer(const std::string& kind, std::string content) {
  // Each id except the unknown word's has a line; the header of words has one line, all other
  // headers have two.
  const std::int64_t lines = std::count(content.begin(), content.end(), '\n');
  const bool has_unknown = content.find("\nunknown yes\n") != std::string::npos;
  const std::int64_t num_ids = kind == "words" ? lines : lines - 2 + (has_unknown ? 1 : 0);
  return {.kind = kind, .content = std::move(content), .vocabulary = num_ids};
}

KnownTokenizer read_tokenizer(const std::string& file) {
  if (is_directory(file)) {
    fail(ExitCode::kData,
         "--tokenizer {}: is a folder; to use the tokenizer of a corpus or run, give --like {}",
         file, file);
  }
  std::string content = read_file(file, kTokenizerMaxBytes, ExitCode::kData);
  for (const char* kind : {"chars", "words", "whitespace"}) {
    if (!content.starts_with(fmt::format("birkhoff {} ", kind))) continue;
    KnownTokenizer tokenizer = vocabulary_tokenizer(kind, std::move(content));
    const auto make = tokenizer.kind == "chars" ? make_char_tokenizer : make_word_tokenizer;
    make(tokenizer.content, file, tokenizer.vocabulary);  // fails if the file is damaged
    return tokenizer;
  }
  try {
    return sentencepiece_tokenizer(std::move(content), file);
  } catch (const Error& error) {
    fail(error.code(), "--tokenizer: neither a vocabulary of chars or words, nor a model: {}",
         error.what());
  }
}

KnownTokenizer read_tokenizer(const TokenizerSource& source) {
  KnownTokenizer tokenizer{.kind = source.kind,
                           .vocabulary = source.vocabulary,
                           .end_of_document = source.end_of_document,
                           .is_source = true};
  if (!source.file.empty())
    tokenizer.content = read_file(source.file, kTokenizerMaxBytes, ExitCode::kData);
  load_tokenizer(source.kind, source.file, source.vocabulary);  // fails if they do not match
  return tokenizer;
}

std::string tokenizer_file_name(const std::string& kind) {
  return "tokenizer." + (kind == "sentencepiece" ? "model" : kind);
}

}  // namespace birkhoff
