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

KnownTokenizer read_tokenizer(const std::string& file) {
  if (is_directory(file)) {
    fail(ExitCode::kData,
         "--tokenizer {}: is a folder; to use the tokenizer of a corpus or run, give --like {}",
         file, file);
  }
  std::string content = read_file(file, kTokenizerMaxBytes, ExitCode::kData);
  const std::int64_t lines = std::count(content.begin(), content.end(), '\n');
  if (content.starts_with("birkhoff chars ")) {
    const bool has_unknown = content.find("\nunknown yes\n") != std::string::npos;
    const std::int64_t num_ids = lines - 2 + (has_unknown ? 1 : 0);  // two header lines
    make_char_tokenizer(content, file, num_ids);
    return {.kind = "chars", .content = std::move(content), .vocabulary = num_ids};
  }
  if (content.starts_with("birkhoff words ")) {
    make_word_tokenizer(content, file, lines);  // one header line; the unknown word has none
    return {.kind = "words", .content = std::move(content), .vocabulary = lines};
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
