#include "data/prepare/prepare_options.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "data/corpus/manifest.h"
#include "data/prepare/table.h"

namespace birkhoff {
namespace {

// SentencePiece puts every pair of symbols of a text into one queue, so its time per byte grows
// with the text. Models trained here yield the same ids however the text is cut
// (docs/corpus_format.md). Models from users may not, so they get longer parts.
std::int64_t default_chunk_bytes(TokenizerKind kind) {
  switch (kind) {
    case TokenizerKind::kSentencePiece:
      return 16 << 10;
    case TokenizerKind::kFile:
    case TokenizerKind::kLike:
      return 64 << 10;
    default:
      return 1 << 20;
  }
}

// The manifest names the columns, so they must be text.
void check_column(const char* option, const std::string& column) {
  if (is_class_name(column)) return;
  fail(ExitCode::kUsage,
       "{}: must be UTF-8, not empty, without control characters; or give the column's number",
       option);
}

}  // namespace

TokenizerKind tokenizer_kind(const PrepareOptions& options) {
  if (options.like) return TokenizerKind::kLike;
  const std::string& tokenizer = options.tokenizer;
  if (tokenizer == "bytes") return TokenizerKind::kBytes;
  if (tokenizer == "chars") return TokenizerKind::kChars;
  if (tokenizer == "words") return TokenizerKind::kWords;
  if (tokenizer == "whitespace") return TokenizerKind::kWhiteSpace;
  if (tokenizer == "sentencepiece") return TokenizerKind::kSentencePiece;
  if (!path_exists(tokenizer)) {
    fail(ExitCode::kUsage,
         "--tokenizer {}: neither bytes, chars, words, whitespace or sentencepiece nor the file of "
         "a vocabulary or model",
         tokenizer);
  }
  return TokenizerKind::kFile;
}

PrepareOptions checked_paths(PrepareOptions options) {
  if (!options.valid_paths.empty()) options.valid_fraction = 0;
  if (!options.test_paths.empty()) options.test_fraction = 0;
  const auto is_fraction = [](double f) { return std::isfinite(f) && f >= 0 && f < 1; };
  if (!is_fraction(options.valid_fraction) || !is_fraction(options.test_fraction) ||
      options.valid_fraction + options.test_fraction >= 1) {
    fail(ExitCode::kUsage,
         "--valid {} --test {}: must be fractions from 0 to below 1 that leave something for "
         "training",
         options.valid_fraction, options.test_fraction);
  }
  if (options.out.empty()) fail(ExitCode::kUsage, "--out: the name of a folder is needed");
  if (options.paths.empty())
    fail(ExitCode::kUsage, "PATH is required: files, folders, or - for standard input");
  std::int64_t standard_inputs = 0;
  for (const auto* paths : {&options.paths, &options.valid_paths, &options.test_paths})
    standard_inputs += std::count(paths->begin(), paths->end(), "-");
  if (standard_inputs > 1)
    fail(ExitCode::kUsage, "-: standard input is given twice; it can be read once");
  return options;
}

PrepareOptions checked_options(PrepareOptions options, TokenizerKind kind) {
  options = checked_paths(std::move(options));
  if (options.table) {
    TableColumns& table = *options.table;
    check_column("--text-column", table.text);
    check_column("--label-column", table.label);
    table.header |= !is_column_number(table.text) || !is_column_number(table.label);
  }
  if (options.format.holds_many()) {
    const bool lines = options.format.kind == TextFormat::kJsonLines;
    if (options.table) {
      fail(ExitCode::kUsage,
           "--text-column: the files are tables, whose rows are documents; leave out --jsonl, "
           "--lines and --separator");
    }
    if (options.format.kind != TextFormat::kLines && options.format.name.empty()) {
      fail(ExitCode::kUsage, "{}: must not be empty", lines ? "--jsonl" : "--separator");
    }
    if (lines) check_column("--jsonl", options.format.name);
  }
  constexpr std::int64_t kMaxIds = 1 << 20;
  const bool of_words = kind == TokenizerKind::kWords || kind == TokenizerKind::kWhiteSpace;
  const bool learns = of_words || kind == TokenizerKind::kSentencePiece;
  if (learns && options.vocab_size == 0) {
    options.vocab_size = kind == TokenizerKind::kWords        ? 32000
                         : kind == TokenizerKind::kWhiteSpace ? kMaxIds
                                                              : 8000;
  }
  // Words: marks and a word; sentencepiece: marks, 256 bytes and some pieces.
  const std::int64_t fewest = of_words ? 3 : 300;
  if (learns ? options.vocab_size < fewest || options.vocab_size > kMaxIds
             : options.vocab_size != 0) {
    fail(ExitCode::kUsage, "--vocab-size {}: {}", options.vocab_size,
         learns ? fmt::format("from {} to {} ids for {}", fewest, kMaxIds, options.tokenizer)
                : fmt::format("only words, whitespace and sentencepiece take it, not {}",
                              options.like ? "--like" : options.tokenizer));
  }
  if (options.chunk_bytes == 0) options.chunk_bytes = default_chunk_bytes(kind);
  // More text does not make a better vocabulary; it only makes training slower.
  if (options.sample_bytes == 0)
    options.sample_bytes = std::clamp<std::int64_t>(512 * options.vocab_size, 4 << 20, 16 << 20);
  require(options.shard_tokens > 0 && options.chunk_bytes > 0 && options.sample_bytes > 0,
          "sizes of shards, chunks and sample");
  return options;
}

}  // namespace birkhoff
