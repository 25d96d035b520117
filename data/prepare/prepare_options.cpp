#include "data/prepare/prepare_options.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
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

// option: the name's, for messages.
TokenizerKind kind_of(const std::string& tokenizer, const char* option) {
  if (tokenizer == "bytes") return TokenizerKind::kBytes;
  if (tokenizer == "chars") return TokenizerKind::kChars;
  if (tokenizer == "words") return TokenizerKind::kWords;
  if (tokenizer == "whitespace") return TokenizerKind::kWhiteSpace;
  if (tokenizer == "sentencepiece") return TokenizerKind::kSentencePiece;
  if (!path_exists(tokenizer)) {
    fail(ExitCode::kUsage,
         "{} {}: neither bytes, chars, words, whitespace or sentencepiece nor the file of a "
         "vocabulary or model",
         option, tokenizer);
  }
  return TokenizerKind::kFile;
}

bool is_of_words(TokenizerKind kind) {
  return kind == TokenizerKind::kWords || kind == TokenizerKind::kWhiteSpace;
}

bool takes_vocab_size(TokenizerKind kind) {
  return is_of_words(kind) || kind == TokenizerKind::kSentencePiece;
}

// Fills in the defaults of a tokenizer.
void set_sizes(const PrepareOptions& options, TokenizerOptions& tokenizer) {
  constexpr std::int64_t kMaxIds = 1 << 20;
  const TokenizerKind kind = tokenizer.kind;
  if (takes_vocab_size(kind)) {
    tokenizer.vocab_size = options.vocab_size;
    if (options.vocab_size == 0) {
      tokenizer.vocab_size = kind == TokenizerKind::kWords        ? 32000
                             : kind == TokenizerKind::kWhiteSpace ? kMaxIds
                                                                  : 8000;
    }
    // Words: marks and a word; sentencepiece: marks, 256 bytes and some pieces.
    const std::int64_t fewest = is_of_words(kind) ? 3 : 300;
    if (tokenizer.vocab_size < fewest || tokenizer.vocab_size > kMaxIds) {
      fail(ExitCode::kUsage, "--vocab-size {}: from {} to {} ids for {}", options.vocab_size,
           fewest, kMaxIds, tokenizer.name);
    }
  }
  tokenizer.chunk_bytes =
      options.chunk_bytes == 0 ? default_chunk_bytes(kind) : options.chunk_bytes;
  // More text does not make a better vocabulary; it only makes training slower.
  tokenizer.sample_bytes =
      options.sample_bytes == 0
          ? std::clamp<std::int64_t>(512 * tokenizer.vocab_size, 4 << 20, 16 << 20)
          : options.sample_bytes;
  require(options.shard_tokens > 0 && tokenizer.chunk_bytes > 0 && tokenizer.sample_bytes > 0,
          "sizes of shards, chunks and sample");
}

void check_pairs(const PrepareOptions& options) {
  const auto check_files = [](const char* source, const std::vector<std::string>& sources,
                              const char* target, const std::vector<std::string>& targets) {
    if (std::ranges::find(sources, "") != sources.end())
      fail(ExitCode::kUsage, "{}: the name of a file is empty", source);
    if (sources.size() == targets.size()) return;
    fail(ExitCode::kUsage,
         "{}: {} of targets for {} of sources ({}); file i of one belongs to file i of the other, "
         "so give as many of both",
         target, counted(targets.size(), "file"), counted(sources.size(), "file"), source);
  };
  check_files("--train", options.paths, "--target", options.target_paths);
  check_files("--valid", options.valid_paths, "--valid-target", options.valid_target_paths);
  check_files("--test", options.test_paths, "--test-target", options.test_target_paths);
  if (options.table || options.format.holds_many()) {
    fail(ExitCode::kUsage,
         "--target: each line of the files is a source or a target; leave out --text-column, "
         "--jsonl, --lines and --separator");
  }
}

}  // namespace

std::vector<TokenizerOptions> tokenizer_options(const PrepareOptions& options) {
  std::vector<TokenizerOptions> tokenizers;
  const auto add = [&](const char* option, const std::string& name,
                       const std::optional<TokenizerSource>& like) {
    TokenizerOptions tokenizer{.name = name, .like = like};
    tokenizer.kind = like ? TokenizerKind::kLike : kind_of(name, option);
    set_sizes(options, tokenizer);
    tokenizers.push_back(tokenizer);
  };
  add("--tokenizer", options.tokenizer, options.like);
  if (!options.source_tokenizer.empty() || options.source_like)
    add("--source-tokenizer", options.source_tokenizer, options.source_like);
  const bool uses_vocab_size = std::ranges::any_of(
      tokenizers, [](const auto& tokenizer) { return takes_vocab_size(tokenizer.kind); });
  if (options.vocab_size != 0 && !uses_vocab_size) {
    fail(ExitCode::kUsage,
         "--vocab-size {}: only words, whitespace and sentencepiece take it, "
         "not {}",
         options.vocab_size, options.like ? "--like" : options.tokenizer);
  }
  return tokenizers;
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

PrepareOptions checked_options(PrepareOptions options) {
  options = checked_paths(std::move(options));
  if (options.has_pairs()) check_pairs(options);
  if (!options.has_pairs() && !options.source_tokenizer.empty()) {
    fail(ExitCode::kUsage, "--source-tokenizer {}: only pairs have sources; give --target, too",
         options.source_tokenizer);
  }
  if (options.table) {
    TableColumns& table = *options.table;
    check_column("--text-column", table.text);
    check_column("--label-column", table.label);
    table.header |= !is_column_number(table.text) || !is_column_number(table.label);
    if (!table.second.empty()) {
      check_column("--second-column", table.second);
      table.header |= !is_column_number(table.second);
    }
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
  return options;
}

}  // namespace birkhoff
