#include "data/prepare/stream_tokenizers.h"

#include <fmt/format.h>

#include <utility>

#include "cluster/base/files/checksum.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {
namespace {

std::optional<KnownTokenizer> known_tokenizer(const TokenizerOptions& options) {
  if (options.kind == TokenizerKind::kBytes)
    return KnownTokenizer{.kind = "bytes", .vocabulary = 256};
  if (options.kind == TokenizerKind::kFile) return read_tokenizer(options.name);
  if (options.kind == TokenizerKind::kLike) return read_tokenizer(*options.like);
  return std::nullopt;
}

}  // namespace

std::string StreamTokenizers::identity(std::size_t i) const {
  const bool is_like = options[i].kind == TokenizerKind::kLike;
  if (options[i].kind != TokenizerKind::kFile && !is_like) return options[i].name;
  const KnownTokenizer& tokenizer = *known[i];
  const std::string hash = xxh3_hex(tokenizer.content.data(), tokenizer.content.size());
  std::string text =
      fmt::format("{} {}", tokenizer.kind == "sentencepiece" ? "model" : tokenizer.kind, hash);
  if (!is_like) return text;
  text += fmt::format(" of {}", counted(tokenizer.vocabulary, "id"));
  if (tokenizer.end_of_document) text += fmt::format(", end {}", *tokenizer.end_of_document);
  return text;
}

StreamTokenizers stream_tokenizers(std::vector<TokenizerOptions> options) {
  StreamTokenizers tokenizers{.options = std::move(options)};
  for (const TokenizerOptions& one : tokenizers.options)
    tokenizers.known.push_back(known_tokenizer(one));
  const auto &first = tokenizers.known.front(), &last = tokenizers.known.back();
  if (tokenizers.size() > 1 && first && first == last) {
    tokenizers.options.pop_back();
    tokenizers.known.pop_back();
  }
  return tokenizers;
}

}  // namespace birkhoff
