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
#include "data/prepare/aligned_files.h"
#include "data/prepare/classes.h"
#include "data/prepare/corpus_source.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/input/split_overlap.h"
#include "data/prepare/input/split_rule.h"
#include "data/prepare/input/text_kind.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_options.h"
#include "data/prepare/prepare_progress.h"
#include "data/prepare/stream_tokenizers.h"
#include "data/prepare/table.h"
#include "data/prepare/text_encoder.h"
#include "data/prepare/tokenizer_learner.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// Whether files hold several documents each.
bool files_hold_many(const PrepareOptions& options) {
  return options.table || options.has_pairs() || options.format.holds_many();
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
  if (options.has_pairs()) return for_each_pair(inputs, folder.path(), visit);
  if (options.table) return for_each_row(inputs, folder.path(), *options.table, visit);
  return for_each_text(inputs, folder.path(), options.format, visit);
}

// The streams of a split. The counts of a split are those of the first.
constexpr std::size_t kFirstStream = 0, kPartnerStream = 1;

std::vector<std::string> stream_names(const PrepareOptions& options) {
  if (options.has_pairs()) return {"target", "source"};
  if (options.table && !options.table->second.empty()) return {"tokens", "second"};
  return {"tokens"};
}

// The next part of a document's text in a stream, at byte `offset`.
using VisitPart = std::function<void(const Document&, std::size_t stream, std::string_view part,
                                     std::int64_t offset)>;

// Visits the text of a document's piece in parts. Of a pair, which is never cut: both texts, the
// partner first.
void for_each_part(const StreamTokenizers& tokenizers, DocumentReader& reader,
                   const DocumentPiece& piece, const VisitPart& visit) {
  const auto read = [&](std::size_t stream, DocumentReader& text, std::int64_t begin,
                        std::int64_t end) {
    const std::int64_t chunk_bytes = tokenizers.options[tokenizers.of_stream(stream)].chunk_bytes;
    for_each_chunk(text, begin, end, chunk_bytes, [&](std::string_view part, std::int64_t offset) {
      visit(text.document(), stream, part, offset);
    });
  };
  if (const Document* partner = reader.document().partner; partner != nullptr) {
    DocumentReader of_partner(*partner);
    read(kPartnerStream, of_partner, 0, partner->bytes);
  }
  read(kFirstStream, reader, piece.begin, piece.end);
}

// XXH3-128 over names and text of the input, whatever the times of its files.
class TextHash {
 public:
  void begin(const Document& document) {
    if (document.partner != nullptr) begin(*document.partner);
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
  Preparation(const PrepareOptions& options, StreamTokenizers tokenizers, const OutFolder& folder,
              const std::vector<InputPath>& inputs, const InputScan& scan, const Classes& classes,
              ProgressReports& progress, ProcessGroup& ranks)
      : options_(options),
        tokenizers_(std::move(tokenizers)),
        folder_(folder),
        inputs_(inputs),
        scan_(scan),
        classes_(classes),
        rule_(scan_, options.valid_fraction, options.test_fraction),
        progress_(progress),
        ranks_(ranks) {}

  // Collective; the manifest is rank 0's.
  CorpusManifest run() {
    if (!tokenizers_.all_known()) learn();
    encode();
    return std::move(manifest_);
  }

  // Notes on the text that was encoded.
  const std::vector<std::string>& notes() const { return notes_; }
  const std::string& text_hash() const { return text_hash_; }

 private:
  using Visit = std::function<void(const Document&, const DocumentPiece&, std::size_t stream,
                                   std::string_view, std::int64_t offset)>;

  // Visits all text piece by piece and calls end(document, piece) after each piece. Fails if the
  // input is no longer what was scanned, or leaves a split without text.
  void pass(const char* phase, const std::vector<std::string>& tokenizers, const Visit& visit,
            const std::function<void(const Document&, const DocumentPiece&)>& end) {
    progress_.begin(phase, scan_.bytes);
    std::vector<TextChecker> checkers;
    for (const std::string& name : tokenizers) checkers.emplace_back(name, name == "bytes");
    std::array<std::int64_t, 3> bytes = {};
    rule_.reset();
    TextHash text_hash;
    const InputScan now = for_each_input(options_, inputs_, folder_, [&](const Document& document) {
      text_hash.begin(document);
      DocumentReader reader(document);
      for (const DocumentPiece& piece : rule_.pieces(document)) {
        std::int64_t piece_bytes = 0;
        for_each_part(tokenizers_, reader, piece,
                      [&](const Document& text_of, std::size_t stream, std::string_view part,
                          std::int64_t offset) {
                        text_hash.add(part);
                        const std::string_view text =
                            checkers[tokenizers_.of_stream(stream)].check(text_of, part, offset);
                        if (!text.empty()) visit(text_of, piece, stream, text, offset);
                        piece_bytes += std::ssize(text);
                        progress_.add(std::ssize(part));
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
    notes_.clear();
    for (const TextChecker& checker : checkers) {
      for (const std::string& note : checker.notes()) notes_.push_back(note);
    }
    text_hash_ = text_hash.hex();
  }

  // Rank 0 learns the tokenizers, whose content depends on all of the text.
  void learn() {
    const bool is_first = ranks_.rank() == 0;
    std::vector<KnownTokenizer> learned(tokenizers_.size());
    if (is_first) learned = learn_all();
    for (std::size_t i = 0; i < tokenizers_.size(); ++i) {
      if (tokenizers_.known[i]) continue;
      if (ranks_.size() == 1 || is_first) tokenizers_.known[i] = learned[i];
      if (ranks_.size() == 1) continue;
      const std::string content = ranks_.broadcast_bytes(learned[i].content, 0, "tokenizer");
      if (is_first) continue;
      const TokenizerOptions& options = tokenizers_.options[i];
      tokenizers_.known[i] = options.kind == TokenizerKind::kSentencePiece
                                 ? sentencepiece_tokenizer(content, "the trained model")
                                 : vocabulary_tokenizer(options.name, content);
    }
  }

  // By tokenizer; those that are known are left empty.
  std::vector<KnownTokenizer> learn_all() {
    std::vector<std::unique_ptr<TokenizerLearner>> learners;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < tokenizers_.size(); ++i) {
      const TokenizerOptions& options = tokenizers_.options[i];
      names.push_back(options.name);
      learners.push_back(tokenizers_.known[i] ? nullptr
                                              : std::make_unique<TokenizerLearner>(
                                                    options, has_end_marks(options_, scan_)));
    }
    const auto visit = [&](const Document&, const DocumentPiece& piece, std::size_t stream,
                           std::string_view text, std::int64_t) {
      TokenizerLearner* learner = learners[tokenizers_.of_stream(stream)].get();
      if (learner != nullptr) learner->add(text, piece.split);
    };
    pass("build vocabulary", names, visit, [](const Document&, const DocumentPiece&) {});
    std::vector<KnownTokenizer> learned(tokenizers_.size());
    for (std::size_t i = 0; i < tokenizers_.size(); ++i) {
      if (learners[i] == nullptr) continue;
      const bool trains = tokenizers_.options[i].kind == TokenizerKind::kSentencePiece;
      if (trains) progress_.begin("train SentencePiece", 0);
      learned[i] = learners[i]->finish();
      if (trains) progress_.end(false);
    }
    return learned;
  }

  // The entry of a tokenizer in the manifest, after its file has been written. prefix: of its name.
  CorpusManifest::Tokenizer entry_of(const KnownTokenizer& tokenizer, const char* prefix) const {
    CorpusManifest::Tokenizer entry;
    if (tokenizer.kind != "bytes") {
      entry.set_file(prefix + tokenizer_file_name(tokenizer.kind));
      entry.set_hash(xxh3_hex(tokenizer.content.data(), tokenizer.content.size()));
      if (ranks_.rank() == 0) write_file_durably(folder_.file(entry.file()), tokenizer.content);
    }
    entry.set_kind(tokenizer.kind);
    entry.set_vocabulary(tokenizer.vocabulary);
    if (!has_end_marks(options_, scan_)) return entry;
    if (tokenizer.end_of_document) {
      entry.set_end_of_document(*tokenizer.end_of_document);
    } else if (!tokenizer.is_source) {
      entry.set_end_of_document(tokenizer.vocabulary);
      entry.set_vocabulary(tokenizer.vocabulary + 1);
    }
    return entry;
  }

  void encode() {
    std::vector<CorpusManifest::Tokenizer> entries;
    std::vector<std::unique_ptr<Tokenizer>> tokenizers;
    std::vector<std::string> kinds;
    for (std::size_t i = 0; i < tokenizers_.size(); ++i) {
      const KnownTokenizer& known = *tokenizers_.known[i];
      entries.push_back(entry_of(known, i == 0 ? "" : "source_"));
      const CorpusManifest::Tokenizer& entry = entries.back();
      kinds.push_back(entry.kind());
      tokenizers.push_back(make_tokenizer(entry.kind(), known.content, folder_.file(entry.file()),
                                          entry.vocabulary()));
    }
    *manifest_.mutable_tokenizer() = entries.front();
    const std::vector<std::string> names = stream_names(options_);
    std::vector<TextEncoder::Stream> streams;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::size_t tokenizer = tokenizers_.of_stream(i);
      streams.push_back({names[i], *tokenizers[tokenizer], entries[tokenizer]});
    }
    TextEncoder::Options options{.folder = folder_.path(), .shard_tokens = options_.shard_tokens};
    for (const SplitIndex split : kSplits) options.has_split[split] = rule_.has(split);
    if (options_.table) options.class_names = &classes_.names();
    TextEncoder encoder(streams, options, ranks_);
    SplitOverlap overlap;
    const auto visit = [&](const Document& document, const DocumentPiece& piece, std::size_t stream,
                           std::string_view text, std::int64_t offset) {
      overlap.add(text);
      encoder.add(piece.split, stream, document, text, offset);
    };
    const auto end = [&](const Document& document, const DocumentPiece& piece) {
      const std::int64_t label = options_.table ? classes_.value_of(document) : 0;
      overlap.end_document(piece.split, document);
      encoder.end_document(piece.split, document, static_cast<std::uint16_t>(label));
    };
    pass("encode", kinds, visit, end);
    for (const std::string& note : overlap.notes()) notes_.push_back(note);
    encoder.finish(manifest_, notes_);
  }

  const PrepareOptions& options_;
  StreamTokenizers tokenizers_;
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
CorpusManifest::Source source_of(const PrepareOptions& options, const StreamTokenizers& tokenizers,
                                 const InputScan& scan) {
  CorpusManifest::Source source;
  const TokenizerOptions& tokenizer = tokenizers.options.front();
  std::string text = fmt::format("tokenizer {}, vocab size {}, {}, shard tokens {}, chunk bytes {}",
                                 tokenizers.identity(0), tokenizer.vocab_size, shares_text(options),
                                 options.shard_tokens, tokenizer.chunk_bytes);
  if (tokenizer.kind == TokenizerKind::kSentencePiece)
    text += fmt::format(", sample bytes {}", tokenizer.sample_bytes);
  if (options.has_pairs()) text += ", pairs";
  if (tokenizers.size() > 1) {
    const TokenizerOptions& of_source = tokenizers.options.back();
    text += fmt::format(", source tokenizer {}, vocab size {}", tokenizers.identity(1),
                        of_source.vocab_size);
  }
  if (options.table) {
    const std::string classes = fmt::format("{}", fmt::join(options.class_names, "\n"));
    text +=
        fmt::format(", text column {}{}, label column {}{}{}", options.table->text,
                    options.table->second.empty() ? "" : ", second column " + options.table->second,
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
bool has_same_text(const PrepareOptions& options, const StreamTokenizers& tokenizers,
                   const std::vector<InputPath>& inputs, const OutFolder& folder,
                   const CorpusManifest::Source& there, std::int64_t bytes,
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
    for_each_part(tokenizers, reader, {.end = document.bytes},
                  [&](const Document&, std::size_t, std::string_view part, std::int64_t) {
                    hash.add(part);
                    progress.add(std::ssize(part));
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
  const PrepareOptions options = checked_options(given);
  const std::vector<TokenizerOptions> of_tokenizers = tokenizer_options(options);
  std::vector<InputPath> inputs = inputs_of(options);
  OutFolder folder(options.out);
  for (const InputPath& input : inputs) {
    folder.require_outside(input.path);
    if (!input.source.empty()) folder.require_outside(input.source);
  }
  for (const TokenizerOptions& tokenizer : of_tokenizers)
    if (tokenizer.kind == TokenizerKind::kFile) folder.require_outside(tokenizer.name);
  const StreamTokenizers tokenizers = stream_tokenizers(of_tokenizers);
  for (const auto& known : tokenizers.known) {
    if (files_hold_many(options) && known && known->is_source && !known->end_of_document) {
      fail(ExitCode::kUsage,
           "--like: its tokenizer has no end mark, because it was made for a single document, and "
           "{} need one; use --tokenizer instead",
           options.table         ? "rows of a table"
           : options.has_pairs() ? "sources and targets"
                                 : "documents in one file");
    }
  }
  ProgressReports progress(callback,
                           (tokenizers.all_known() ? 1 : 2) + (files_hold_many(options) ? 1 : 0));
  if (is_first) {
    folder.begin();
    folder.clear();
  }
  if (options.has_pairs()) {
    require_no_streams(inputs,
                       "pairs are read from files, both sides at the same time, more than "
                       "once; save it to a file");
  } else if (several == nullptr) {
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
  const CorpusManifest::Source source = source_of(options, tokenizers, scan);
  const bool is_finished =
      agree_on_input(ranks, fmt::format("{}, input {}", source.options(), source.input_hash()),
                     folder.finished(), "text");
  if (is_finished && !is_first) return result;
  if (is_finished) {
    require_same(
        folder, source, "text",
        "an earlier version made the corpus, which recorded their times and not their text",
        [&](const CorpusManifest::Source& there) {
          return has_same_text(options, tokenizers, inputs, folder, there, scan.bytes, progress);
        });
    result.already_prepared = true;
  } else {
    Classes classes(options.class_names);
    scan = scan_documents(options, inputs, folder, scan, classes, progress);
    require_documents(scan, options, "text");
    if (options.table) classes.finish(inputs.front().path);
    Preparation preparation(options, tokenizers, folder, inputs, scan, classes, progress, ranks);
    CorpusManifest manifest = preparation.run();
    if (!is_first) return result;
    result.notes = preparation.notes();
    if (scan.empty_texts > 0) {
      result.notes.push_back(
          fmt::format("skipped {} without text",
                      counted(scan.empty_texts, options.has_pairs() ? "pair" : "document")));
    }
    *manifest.mutable_source() = source;
    manifest.mutable_source()->set_text_hash(preparation.text_hash());
    write_file_durably(folder.file(kCorpusManifestName), manifest_json(manifest));
  }
  folder.end();
  return result;
}

}  // namespace birkhoff
