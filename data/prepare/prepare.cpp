#include "data/prepare/prepare.h"

#include <fmt/compile.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/manifest.h"
#include "data/prepare/classes.h"
#include "data/prepare/corpus_source.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/input/split_overlap.h"
#include "data/prepare/input/split_rule.h"
#include "data/prepare/input/text_kind.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_options.h"
#include "data/prepare/prepare_progress.h"
#include "data/prepare/table.h"
#include "data/prepare/text_encoder.h"
#include "data/tokenizers/char_vocabulary.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "data/tokenizers/tokenizer_file.h"
#include "data/tokenizers/word_vocabulary.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// Whether files hold several documents each.
bool files_hold_many(const PrepareOptions& options) {
  return options.table || options.format.holds_many();
}

// If a split has several documents, each of them ends in the end mark. One among many in a file
// always does, so that its tokens do not depend on their number.
bool has_end_marks(const PrepareOptions& options, const InputScan& scan) {
  return files_hold_many(options) ||
         *std::max_element(scan.documents_of.begin(), scan.documents_of.end()) > 1;
}

[[noreturn]] void fail_as_changed(const InputScan& before, const InputScan& now) {
  fail(ExitCode::kData,
       "the input changed while it was read ({}, {}; then {}, {}); start the command again",
       counted(before.documents, "document"), counted(before.bytes, "byte"),
       counted(now.documents, "document"), counted(now.bytes, "byte"));
}

// Visits the documents in the files.
InputScan for_each_input(const PrepareOptions& options, const std::vector<InputPath>& inputs,
                         const OutFolder& folder,
                         const std::function<void(const Document&)>& visit) {
  if (options.table) return for_each_row(inputs, folder.path(), *options.table, visit);
  return for_each_text(inputs, folder.path(), options.format, visit);
}

// XXH3-128 over names and text of the input, whatever the times of its files.
class TextHash {
 public:
  void begin(const Document& document) {
    // Lengths come first, so that no two inputs yield the same bytes.
    fmt::memory_buffer line;
    fmt::format_to(std::back_inserter(line), FMT_COMPILE("{}:{} {}:{} {} {}\n"),
                   document.name.size(), document.name, document.label.size(), document.label,
                   kSplitNames[document.split], document.bytes);
    add({line.data(), line.size()});
  }
  void add(std::string_view part) { hasher_.update(part.data(), part.size()); }
  std::string hex() const { return hasher_.hex_digest(); }

 private:
  Xxh3Hasher hasher_;
};

// One command, from scanned input to manifest.
class Preparation {
 public:
  Preparation(const PrepareOptions& options, TokenizerKind kind, const OutFolder& folder,
              const std::vector<InputPath>& inputs, const InputScan& scan, const Classes& classes,
              ProgressReports& progress, ProcessGroup& ranks)
      : options_(options),
        kind_(kind),
        folder_(folder),
        inputs_(inputs),
        scan_(scan),
        classes_(classes),
        rule_(scan_, options.valid_fraction, options.test_fraction),
        progress_(progress),
        ranks_(ranks) {}

  // known: the tokenizer, unless it is to be learned. Collective; the manifest is rank 0's.
  CorpusManifest run(const std::optional<KnownTokenizer>& known) {
    encode(known ? *known : learned_tokenizer());
    return std::move(manifest_);
  }

  // Notes on the text that was encoded.
  const std::vector<std::string>& notes() const { return notes_; }
  const std::string& text_hash() const { return text_hash_; }

 private:
  using Visit = std::function<void(const Document&, const DocumentPiece&, std::string_view,
                                   std::int64_t offset)>;

  // Visits all text piece by piece and calls end(document, piece) after each piece. Fails if the
  // input is no longer what was scanned, or leaves a split without text.
  void pass(const char* phase, const std::string& tokenizer, const Visit& visit,
            const std::function<void(const Document&, const DocumentPiece&)>& end) {
    progress_.begin(phase, scan_.bytes);
    TextChecker checker(tokenizer, tokenizer == "bytes");
    std::array<std::int64_t, 3> bytes = {};
    rule_.reset();
    TextHash text_hash;
    const InputScan now = for_each_input(options_, inputs_, folder_, [&](const Document& document) {
      text_hash.begin(document);
      DocumentReader reader(document);
      for (const DocumentPiece& piece : rule_.pieces(document)) {
        std::int64_t piece_bytes = 0;
        for_each_chunk(reader, piece.begin, piece.end, options_.chunk_bytes,
                       [&](std::string_view part, std::int64_t offset) {
                         text_hash.add(part);
                         const std::string_view text = checker.check(document, part, offset);
                         if (!text.empty()) visit(document, piece, text, offset);
                         piece_bytes += static_cast<std::int64_t>(text.size());
                         progress_.add(static_cast<std::int64_t>(part.size()));
                       });
        if (piece_bytes > 0) end(document, piece);
        bytes[piece.split] += piece_bytes;
      }
    });
    if (now.hash != scan_.hash) fail_as_changed(scan_, now);
    for (const SplitIndex split : kSplits) {
      if (bytes[split] > 0 || !rule_.has(split)) continue;
      fail_as_empty(split, inputs_.front().path,
                    fmt::format("{} of text in {}", counted(scan_.bytes, "byte"),
                                counted(scan_.documents, "document")),
                    options_);
    }
    progress_.end(true);
    notes_ = checker.notes();
    text_hash_ = text_hash.hex();
  }

  KnownTokenizer learn_tokenizer() {
    CharVocabulary chars;
    WordVocabulary words(kind_ == TokenizerKind::kWords ? WordRule::kAll : WordRule::kWhiteSpace);
    LineSampler lines(options_.sample_bytes);
    const auto visit = [&](const Document&, const DocumentPiece& piece, std::string_view text,
                           std::int64_t) {
      if (kind_ == TokenizerKind::kChars) return chars.add(text, piece.split == kTrain);
      if (kind_ != TokenizerKind::kSentencePiece) return words.add(text, piece.split == kTrain);
      if (piece.split == kTrain) lines.add(text);
    };
    pass("build vocabulary", options_.tokenizer, visit,
         [](const Document&, const DocumentPiece&) {});
    switch (kind_) {
      case TokenizerKind::kChars:
        return vocabulary_tokenizer(options_.tokenizer, chars.file_content());
      case TokenizerKind::kWords:
      case TokenizerKind::kWhiteSpace:
        return vocabulary_tokenizer(
            options_.tokenizer,
            words.file_content(options_.vocab_size - (has_end_marks(options_, scan_) ? 1 : 0)));
      default:
        progress_.begin("train SentencePiece", 0);
        progress_.end(false);
        return sentencepiece_tokenizer(train_sentencepiece(lines.lines(), options_.vocab_size),
                                       "the trained model");
    }
  }

  // Rank 0 learns the tokenizer, whose content depends on all of the text.
  KnownTokenizer learned_tokenizer() {
    const bool is_first = ranks_.rank() == 0;
    const KnownTokenizer learned = is_first ? learn_tokenizer() : KnownTokenizer{};
    if (ranks_.size() == 1) return learned;
    const std::string content = ranks_.broadcast_bytes(learned.content, 0, "tokenizer");
    if (is_first) return learned;
    return kind_ == TokenizerKind::kSentencePiece
               ? sentencepiece_tokenizer(content, "the trained model")
               : vocabulary_tokenizer(options_.tokenizer, content);
  }

  void set_tokenizer(const KnownTokenizer& tokenizer) {
    auto& entry = *manifest_.mutable_tokenizer();
    if (tokenizer.kind != "bytes") {
      entry.set_file(tokenizer_file_name(tokenizer.kind));
      entry.set_hash(xxh3_hex(tokenizer.content.data(), tokenizer.content.size()));
      if (ranks_.rank() == 0) write_file_durably(folder_.file(entry.file()), tokenizer.content);
    }
    entry.set_kind(tokenizer.kind);
    entry.set_vocabulary(tokenizer.vocabulary);
    if (!has_end_marks(options_, scan_)) return;
    if (tokenizer.end_of_document) {
      entry.set_end_of_document(*tokenizer.end_of_document);
    } else if (!tokenizer.is_source) {
      entry.set_end_of_document(tokenizer.vocabulary);
      entry.set_vocabulary(tokenizer.vocabulary + 1);
    }
  }

  void encode(const KnownTokenizer& known) {
    set_tokenizer(known);
    const auto& entry = manifest_.tokenizer();
    const std::unique_ptr<Tokenizer> tokenizer =
        make_tokenizer(entry.kind(), known.content, folder_.file(entry.file()), entry.vocabulary());
    TextEncoder::Options options{.folder = folder_.path(), .shard_tokens = options_.shard_tokens};
    for (const SplitIndex split : kSplits) options.has_split[split] = rule_.has(split);
    if (options_.table) options.class_names = &classes_.names();
    TextEncoder encoder(*tokenizer, entry, options, ranks_);
    SplitOverlap overlap;
    const auto visit = [&](const Document& document, const DocumentPiece& piece,
                           std::string_view text, std::int64_t offset) {
      overlap.add(text);
      encoder.add(piece.split, document, text, offset);
    };
    const auto end = [&](const Document& document, const DocumentPiece& piece) {
      const std::int64_t label = options_.table ? classes_.value_of(document) : 0;
      overlap.end_document(piece.split, document);
      encoder.end_document(piece.split, document, static_cast<std::uint16_t>(label));
    };
    pass("encode", entry.kind(), visit, end);
    for (const std::string& note : overlap.notes()) notes_.push_back(note);
    encoder.finish(manifest_, notes_);
  }

  const PrepareOptions& options_;
  const TokenizerKind kind_;
  const OutFolder& folder_;
  const std::vector<InputPath>& inputs_;
  const InputScan& scan_;
  const Classes& classes_;
  SplitRule rule_;
  ProgressReports& progress_;
  ProcessGroup& ranks_;
  std::vector<std::string> notes_;
  std::string text_hash_;
  CorpusManifest manifest_ = new_manifest();
};

// Paths are part of the hash of the input.
CorpusManifest::Source source_of(const PrepareOptions& options, TokenizerKind kind,
                                 const std::optional<KnownTokenizer>& known,
                                 const InputScan& scan) {
  CorpusManifest::Source source;
  std::string tokenizer = options.tokenizer;
  if (kind == TokenizerKind::kFile || kind == TokenizerKind::kLike) {
    const std::string hash = xxh3_hex(known->content.data(), known->content.size());
    tokenizer = fmt::format("{} {}", known->kind == "sentencepiece" ? "model" : known->kind, hash);
  }
  if (kind == TokenizerKind::kLike) {
    tokenizer += fmt::format(" of {}", counted(known->vocabulary, "id"));
    if (known->end_of_document) tokenizer += fmt::format(", end {}", *known->end_of_document);
  }
  std::string text = fmt::format("tokenizer {}, vocab size {}, {}, shard tokens {}, chunk bytes {}",
                                 tokenizer, options.vocab_size, shares_text(options),
                                 options.shard_tokens, options.chunk_bytes);
  if (kind == TokenizerKind::kSentencePiece)
    text += fmt::format(", sample bytes {}", options.sample_bytes);
  if (options.table) {
    const std::string classes = fmt::format("{}", fmt::join(options.class_names, "\n"));
    text +=
        fmt::format(", text column {}, label column {}{}{}", options.table->text,
                    options.table->label, options.table->header ? ", header" : "",
                    classes.empty() ? "" : ", classes " + xxh3_hex(classes.data(), classes.size()));
  }
  if (options.format.holds_many()) text += ", " + describe(options.format);
  // Earlier versions, which knew no tables, held out a fraction of the documents, not of their
  // bytes.
  const bool holds_out = options.valid_fraction > 0 || options.test_fraction > 0;
  if (holds_out && !options.table && scan.documents_of[kTrain] > 1) text += ", shares of bytes";
  source.set_options(text);
  source.set_input_hash(scan.hash);
  return source;
}

// Whether the input, whose times differ, has the text that the folder's corpus was made from.
bool has_same_text(const PrepareOptions& options, const std::vector<InputPath>& inputs,
                   const OutFolder& folder, const CorpusManifest::Source& there, std::int64_t bytes,
                   ProgressReports& progress) {
  // A stream has been read already: its hash is part of the input's.
  const bool is_read = std::any_of(inputs.begin(), inputs.end(), [](const InputPath& input) {
    return !input.content_hash.empty();
  });
  if (!there.has_text_hash() || is_read) return false;
  progress.begin("compare", bytes);
  TextHash hash;
  for_each_input(options, inputs, folder, [&](const Document& document) {
    hash.begin(document);
    DocumentReader reader(document);
    for_each_chunk(reader, 0, document.bytes, options.chunk_bytes,
                   [&](std::string_view part, std::int64_t) {
                     hash.add(part);
                     progress.add(static_cast<std::int64_t>(part.size()));
                   });
  });
  progress.end(true);
  return hash.hex() == there.text_hash();
}

// Reads all documents once, to count them and find their classes. files: the scan of the same
// files.
InputScan scan_documents(const PrepareOptions& options, const std::vector<InputPath>& inputs,
                         const OutFolder& folder, const InputScan& files, Classes& classes,
                         ProgressReports& progress) {
  const bool shows = files_hold_many(options);     // else it only looks at files, unless compressed
  if (shows) progress.begin("read documents", 0);  // files hold more than texts
  const InputScan scan = for_each_input(options, inputs, folder, [&](const Document& document) {
    if (options.table) classes.add(document);
    if (shows) progress.add(document.bytes);
  });
  if (shows) progress.end(true);
  if (scan.hash != files.hash) fail_as_changed(files, scan);
  return scan;
}

}  // namespace

PrepareResult prepare_corpus(const PrepareOptions& given,
                             const std::function<void(const PrepareProgress&)>& callback,
                             ProcessGroup* several) {
  const std::unique_ptr<ProcessGroup> alone = make_single_group();
  ProcessGroup& ranks = several == nullptr ? *alone : *several;
  const bool is_first = ranks.rank() == 0;
  const TokenizerKind kind = tokenizer_kind(given);
  const PrepareOptions options = checked_options(given, kind);
  std::vector<InputPath> inputs = inputs_of(options);
  OutFolder folder(options.out);
  for (const InputPath& input : inputs) folder.require_outside(input.path);
  if (kind == TokenizerKind::kFile) folder.require_outside(options.tokenizer);
  std::optional<KnownTokenizer> known;
  if (kind == TokenizerKind::kBytes) known = KnownTokenizer{.kind = "bytes", .vocabulary = 256};
  if (kind == TokenizerKind::kFile) known = read_tokenizer(options.tokenizer);
  if (kind == TokenizerKind::kLike) known = read_tokenizer(*options.like);
  if (files_hold_many(options) && kind == TokenizerKind::kLike && !known->end_of_document) {
    fail(ExitCode::kUsage,
         "--like: its tokenizer has no end mark, because it was made for a single document, and "
         "{} need one; use --tokenizer instead",
         options.table ? "rows of a table" : "documents in one file");
  }
  ProgressReports progress(callback, (known ? 1 : 2) + (files_hold_many(options) ? 1 : 0));
  if (is_first) {
    folder.begin();
    folder.clear();
  }
  if (several == nullptr) {
    folder.spool(inputs, progress);
  } else {
    require_no_streams(inputs,
                       "ranks cannot read a pipe; give files or folders, or leave --ranks out");
  }
  InputScan scan = for_each_document(inputs, folder.path(), [](const Document&) {});
  require_documents(scan, options, "text");
  PrepareResult result;
  result.empty_files = scan.empty_files;
  result.not_regular = scan.not_regular;
  const CorpusManifest::Source source = source_of(options, kind, known, scan);
  const bool is_finished =
      agree_on_input(ranks, fmt::format("{}, input {}", source.options(), source.input_hash()),
                     folder.finished(), "text");
  if (is_finished && !is_first) return result;
  if (is_finished) {
    require_same(
        folder, source, "text",
        "an earlier version made the corpus, which recorded their times and not their text",
        [&](const CorpusManifest::Source& there) {
          return has_same_text(options, inputs, folder, there, scan.bytes, progress);
        });
    result.already_prepared = true;
  } else {
    Classes classes(options.class_names);
    scan = scan_documents(options, inputs, folder, scan, classes, progress);
    require_documents(scan, options, "text");
    if (options.table) classes.finish(inputs.front().path);
    Preparation preparation(options, kind, folder, inputs, scan, classes, progress, ranks);
    CorpusManifest manifest = preparation.run(known);
    if (!is_first) return result;
    result.notes = preparation.notes();
    if (scan.empty_texts > 0) {
      result.notes.push_back(
          fmt::format("skipped {} without text", counted(scan.empty_texts, "document")));
    }
    *manifest.mutable_source() = source;
    manifest.mutable_source()->set_text_hash(preparation.text_hash());
    write_file_durably(folder.file(kCorpusManifestName), manifest_json(manifest));
  }
  folder.end();
  return result;
}

}  // namespace birkhoff
