#include "data/prepare.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <regex>

#include "cluster/base/checksum.h"
#include "cluster/base/error.h"
#include "cluster/base/file.h"
#include "data/char_vocabulary.h"
#include "data/corpus.h"
#include "data/documents.h"
#include "data/manifest.h"
#include "data/prepare_options.h"
#include "data/sentencepiece_tokenizer.h"
#include "data/shard_format.h"
#include "data/shard_writer.h"
#include "data/text_counts.h"
#include "data/tokenizer_file.h"
#include "data/utf8.h"
#include "data/word_vocabulary.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using Clock = std::chrono::steady_clock;

constexpr char kStream[] = "tokens";
// A folder with this file and no manifest was left by a prepare that did not end; also the lock
// against a second one.
constexpr char kUnfinishedName[] = ".unfinished";
constexpr char kSpoolPrefix[] = ".input-";
// Every name that prepare gives in the folder, with those of temporary files.
constexpr char kOurNames[] = R"((train|valid|test)-tokens-\d{5,}\.h5(\.tmp)?)"
                             R"(|(tokenizer\.(chars|words|model)|manifest\.json)(\.tmp-\d+)?)"
                             R"(|\.input-\d+|\.unfinished)";

bool same_file(const std::string& a, const std::string& b) {
  struct stat info_a, info_b;
  return find_status(a, /*follow_links=*/true, &info_a, ExitCode::kUsage) &&
         find_status(b, /*follow_links=*/true, &info_b, ExitCode::kUsage) &&
         info_a.st_dev == info_b.st_dev && info_a.st_ino == info_b.st_ino;
}

// Times phases and calls the user's function now and then.
class Progress {
 public:
  Progress(const std::function<void(const PrepareProgress&)>& callback, int num_passes)
      : callback_(callback), num_passes_(num_passes) {}

  void begin(const char* phase, std::int64_t total_bytes) {
    now_.phase = phase;
    now_.done_bytes = 0;
    now_.total_bytes = total_bytes;
    phase_start_ = Clock::now();
  }
  void add(std::int64_t bytes) {
    now_.done_bytes += bytes;
    if (Clock::now() - last_ >= std::chrono::milliseconds(100)) report();
  }
  // Of a pass over the input, as opposed to spooling.
  void end(bool pass) {
    report();
    if (pass) ++passes_done_;
  }

 private:
  void report() {
    if (!callback_) return;
    last_ = Clock::now();
    now_.elapsed_seconds = std::chrono::duration<double>(last_ - start_).count();
    now_.eta_seconds = -1;
    if (now_.total_bytes > 0 && now_.done_bytes > 0) {
      const double done =
          static_cast<double>(now_.done_bytes) / static_cast<double>(now_.total_bytes);
      const double left = std::max(0.0, num_passes_ - passes_done_ - done);
      now_.eta_seconds = std::chrono::duration<double>(last_ - phase_start_).count() * left / done;
    }
    callback_(now_);
  }

  const std::function<void(const PrepareProgress&)>& callback_;
  int num_passes_, passes_done_ = 0;
  Clock::time_point start_ = Clock::now(), phase_start_ = start_, last_ = start_;
  PrepareProgress now_;
};

// The folder to be made: what it holds already decides what happens.
class OutFolder {
 public:
  explicit OutFolder(std::string path) : path_(std::move(path)) {
    if (path_exists(path_) && !is_directory(path_))
      fail(ExitCode::kUsage, "--out {}: is a file; name a folder", path_);
    make_directory(path_);
  }

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // The folder was a corpus already when the command began.
  bool finished() const { return finished_; }

  // The folder itself, and what lies directly in it, is no input: it might be removed.
  void require_outside(const std::vector<std::string>& inputs) const {
    for (const std::string& input : inputs) {
      if (input == "-") continue;
      if (same_file(input, path_) || same_file(parent_path(input), path_)) {
        fail(ExitCode::kUsage, "{}: lies in --out {}; name another folder, or move the text out",
             input, path_);
      }
    }
  }

  // Takes the lock and removes what an unfinished command left, if the folder is not a finished
  // corpus.
  void begin() {
    const bool marked = path_exists(file(kUnfinishedName));
    finished_ = has_manifest();
    if (finished_ && !marked) return;
    if (!marked && !list_directory(path_).empty()) {
      fail(ExitCode::kUsage,
           "--out {}: is neither empty nor a corpus; name another folder, or empty this one",
           path_);
    }
    if (!finished_) require_only_leftovers();
    lock_.emplace(file(kUnfinishedName), "the corpus folder " + path_);
    sync_directory(path_);       // no other name may outlive the mark in a crash of the machine
    finished_ = has_manifest();  // another command may have ended before it gave us the lock
    if (!finished_) remove_leftovers();
  }

  // Inputs that cannot be read twice (standard input, pipes) are copied into the folder, or only
  // hashed if the corpus is finished; the others stay where they are.
  std::vector<InputPath> spool(const std::vector<std::string>& paths, Progress& progress) {
    std::vector<InputPath> inputs;
    for (const std::string& path : paths) {
      struct stat info;
      const bool is_stream =
          path == "-" || (find_status(path, /*follow_links=*/true, &info, ExitCode::kUsage) &&
                          !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode));
      inputs.push_back(is_stream ? spool_one(path, inputs.size(), progress) : InputPath{path});
    }
    return inputs;
  }

  // There is a manifest now: removes what only an unfinished folder has.
  void end() {
    if (!lock_) return;
    for (const std::string& name : list_directory(path_)) {
      if (is_ours(name) && name.starts_with(kSpoolPrefix)) remove_file(file(name));
    }
    sync_directory(path_);  // the mark goes last: without it nobody looks for the rest
    if (path_exists(file(kUnfinishedName))) remove_file(file(kUnfinishedName));
    sync_directory(path_);
  }

 private:
  bool has_manifest() const { return path_exists(file(kManifestName)); }

  static bool is_ours(const std::string& name) {
    return std::regex_match(name, std::regex(kOurNames));
  }
  // Before the lock, which writes: beside a file that prepare did not make, nothing is touched.
  void require_only_leftovers() const {
    for (const std::string& name : list_directory(path_)) {
      if (is_ours(name)) continue;
      fail(ExitCode::kUsage,
           "--out {}: holds '{}' beside what an unfinished prepare left; move it away, or name "
           "another folder",
           path_, name);
    }
  }
  void remove_leftovers() const {
    for (const std::string& name : list_directory(path_)) {
      if (is_ours(name) && name != kUnfinishedName) remove_file(file(name));
    }
  }

  InputPath spool_one(const std::string& path, std::size_t number, Progress& progress) {
    progress.begin("read standard input", 0);
    const std::string copy = file(fmt::format("{}{}", kSpoolPrefix, number));
    File in =
        path == "-" ? File::standard_input() : File::open_stream_for_read(path, ExitCode::kData);
    std::optional<File> out;
    if (!finished_) out = File::create(copy);
    Xxh3Hasher hasher;
    std::int64_t bytes = 0;
    std::vector<char> part(1 << 20);
    while (const std::size_t got = in.read_some(part.data(), part.size())) {
      if (out) out->write_all(part.data(), got);
      hasher.update(part.data(), got);
      bytes += static_cast<std::int64_t>(got);
      progress.add(static_cast<std::int64_t>(got));
    }
    if (out) out->close();
    progress.end(false);
    return {copy, hasher.hex_digest(), bytes};
  }

  std::string path_;
  bool finished_ = false;
  std::optional<FileLock> lock_;
};

// One command, from scanned input to manifest.
class Preparation {
 public:
  Preparation(const PrepareOptions& options, TokenizerKind kind, OutFolder& folder,
              std::vector<InputPath> inputs, InputScan scan, Progress& progress)
      : options_(options),
        kind_(kind),
        folder_(folder),
        inputs_(std::move(inputs)),
        scan_(std::move(scan)),
        rule_(scan_, options.valid_fraction, options.test_fraction),
        progress_(progress) {}

  CorpusManifest run() {
    if (kind_ == TokenizerKind::kModelFile) {
      take_model(read_file(options_.tokenizer, kTokenizerMaxBytes, ExitCode::kData),
                 options_.tokenizer);
    } else if (kind_ == TokenizerKind::kBytes) {
      set_vocabulary(256);
    } else {
      learn_vocabulary();
    }
    manifest_.set_format(shard_format::kManifestFormat);
    manifest_.set_version(shard_format::kManifestVersion);
    encode();
    return std::move(manifest_);
  }

 private:
  using Visit = std::function<void(const Piece&, std::string_view)>;

  // All text, piece by piece; end(piece) after each piece. The input must still be what was
  // scanned.
  void pass(const char* phase, const Visit& visit, const std::function<void(const Piece&)>& end) {
    progress_.begin(phase, scan_.bytes);
    const InputScan now = for_each_document(inputs_, folder_.path(), [&](const Document& document) {
      for (const Piece& piece : rule_.pieces(document)) {
        for_each_chunk(document, piece, options_.chunk_bytes,
                       [&](std::string_view text, std::int64_t offset) {
                         check_utf8(document, text, offset);
                         visit(piece, text);
                         progress_.add(static_cast<std::int64_t>(text.size()));
                       });
        end(piece);
      }
    });
    if (now.hash != scan_.hash) {
      fail(ExitCode::kData,
           "the input changed while it was read ({} documents, {} bytes; then {}, {}); start the "
           "command again",
           scan_.documents, scan_.bytes, now.documents, now.bytes);
    }
    progress_.end(true);
  }

  void check_utf8(const Document& document, std::string_view text, std::int64_t offset) const {
    if (kind_ == TokenizerKind::kBytes) return;
    const std::size_t invalid = find_invalid_utf8(text);
    if (invalid == std::string_view::npos) return;
    fail(ExitCode::kData,
         "{}: byte {} is not UTF-8, which --tokenizer {} needs; convert or leave out the file, or "
         "use bytes",
         document.path, offset + static_cast<std::int64_t>(invalid), options_.tokenizer);
  }

  void learn_vocabulary() {
    CharVocabulary chars;
    WordVocabulary words;
    LineSampler lines(options_.sample_bytes);
    const auto visit = [&](const Piece& piece, std::string_view text) {
      if (kind_ == TokenizerKind::kChars) return chars.add(text, piece.split == kTrain);
      if (piece.split != kTrain) return;
      if (kind_ == TokenizerKind::kWords) return words.add(text);
      lines.add(text);
    };
    pass("build vocabulary", visit, [](const Piece&) {});
    switch (kind_) {
      case TokenizerKind::kChars:
        write_tokenizer("tokenizer.chars", chars.file_content());
        return set_vocabulary(chars.num_ids());
      case TokenizerKind::kWords: {
        const std::string content =
            words.file_content(options_.vocab_size - 1 - (many_documents() ? 1 : 0));
        write_tokenizer("tokenizer.words", content);
        return set_vocabulary(
            std::count(content.begin(), content.end(), '\n'));  // header line and <unk> cancel
      }
      default:
        progress_.begin("train SentencePiece", 0);
        progress_.end(false);
        return take_model(train_sentencepiece(lines.lines(), options_.vocab_size),
                          "the trained model");
    }
  }

  bool many_documents() const { return scan_.documents > 1; }

  void take_model(const std::string& content, const std::string& name) {
    const SentencePieceModel model = check_sentencepiece_model(content, name);
    write_tokenizer("tokenizer.model", content);
    set_vocabulary(model.num_pieces, model.end_of_document);
  }

  void write_tokenizer(const char* file, const std::string& content) {
    write_file_durably(folder_.file(file), content);
    manifest_.mutable_tokenizer()->set_file(file);
    manifest_.mutable_tokenizer()->set_hash(xxh3_hex(content.data(), content.size()));
  }

  // Several documents get an end mark: the model's own, or one more id.
  void set_vocabulary(std::int64_t num_ids, std::int64_t own_mark = -1) {
    auto& tokenizer = *manifest_.mutable_tokenizer();
    tokenizer.set_kind(kind_ == TokenizerKind::kModelFile ? "sentencepiece" : options_.tokenizer);
    if (many_documents()) {
      tokenizer.set_end_of_document(own_mark >= 0 ? own_mark : num_ids);
      if (own_mark < 0) ++num_ids;
    }
    tokenizer.set_vocabulary(num_ids);
  }

  void encode() {
    const auto& entry = manifest_.tokenizer();
    const std::unique_ptr<Tokenizer> tokenizer =
        load_tokenizer(entry.kind(), folder_.file(entry.file()), entry.vocabulary());
    const auto dtype = entry.vocabulary() <= 65536 ? CorpusManifest::u16 : CorpusManifest::i32;
    struct Output {
      std::optional<StreamWriter> writer;
      TextCounter counter;
    };
    std::array<Output, 3> outputs;
    for (const SplitIndex split : {kTrain, kValid, kTest}) {
      if (rule_.has(split)) {
        outputs[split].writer.emplace(folder_.path(), kSplitNames[split], kStream, dtype,
                                      options_.shard_tokens);
      }
    }
    const auto visit = [&](const Piece& piece, std::string_view text) {
      outputs[piece.split].counter.add(text);
      outputs[piece.split].writer->append(tokenizer->encode(text));
    };
    const auto end = [&](const Piece& piece) {
      Output& output = outputs[piece.split];
      if (entry.has_end_of_document())
        output.writer->append({static_cast<std::int32_t>(entry.end_of_document())});
      output.writer->end_document();
      output.counter.end_document();
    };
    pass("encode", visit, end);
    for (const SplitIndex split : {kTrain, kValid, kTest}) {
      if (!rule_.has(split)) continue;
      auto& written = *manifest_.add_split();
      written.set_name(kSplitNames[split]);
      *written.add_stream() = outputs[split].writer->finish();
      *written.mutable_counts() = outputs[split].counter.counts();
      if (written.counts().documents() == 0) {
        fail(ExitCode::kUsage,
             "none of {} documents fell into the {} split; give it a larger fraction",
             scan_.documents, kSplitNames[split]);
      }
    }
  }

  const PrepareOptions& options_;
  TokenizerKind kind_;
  OutFolder& folder_;
  std::vector<InputPath> inputs_;
  InputScan scan_;
  SplitRule rule_;
  Progress& progress_;
  CorpusManifest manifest_;
};

// Same text, same corpus. Paths are part of the input's hash.
CorpusManifest::Source source_of(const PrepareOptions& options, TokenizerKind kind,
                                 const InputScan& scan) {
  CorpusManifest::Source source;
  std::string tokenizer = options.tokenizer;
  if (kind == TokenizerKind::kModelFile) {
    const std::string content = read_file(options.tokenizer, kTokenizerMaxBytes, ExitCode::kData);
    tokenizer = "model " + xxh3_hex(content.data(), content.size());
  }
  std::string text =
      fmt::format("tokenizer {}, vocab size {}, valid {}, test {}, shard tokens {}, chunk bytes {}",
                  tokenizer, options.vocab_size, options.valid_fraction, options.test_fraction,
                  options.shard_tokens, options.chunk_bytes);
  if (kind == TokenizerKind::kSentencePiece)
    text += fmt::format(", sample bytes {}", options.sample_bytes);
  source.set_options(text);
  source.set_input_hash(scan.hash);
  return source;
}

// An Error if the folder holds the corpus of another source.
void require_same(const OutFolder& folder, const CorpusManifest::Source& source) {
  const Corpus corpus(folder.path());
  const auto& there = corpus.manifest().source();
  if (there.options() != source.options()) {
    fail(ExitCode::kUsage,
         "--out {}: holds a corpus made with other options ({}); name another folder or delete "
         "this one",
         folder.path(), there.options());
  }
  if (there.input_hash() != source.input_hash()) {
    fail(ExitCode::kUsage,
         "--out {}: holds a corpus made from other text, or the text has changed since; name "
         "another folder or delete this one",
         folder.path());
  }
}

}  // namespace

PrepareResult prepare_corpus(const PrepareOptions& given,
                             const std::function<void(const PrepareProgress&)>& callback) {
  const TokenizerKind kind = tokenizer_kind(given.tokenizer);
  const PrepareOptions options = checked_options(given, kind);
  const bool learns = kind != TokenizerKind::kBytes && kind != TokenizerKind::kModelFile;
  Progress progress(callback, learns ? 2 : 1);
  OutFolder folder(options.out);
  folder.require_outside(options.paths);
  if (kind == TokenizerKind::kModelFile) folder.require_outside({options.tokenizer});
  folder.begin();
  const std::vector<InputPath> inputs = folder.spool(options.paths, progress);
  const InputScan scan = for_each_document(inputs, folder.path(), [](const Document&) {});
  if (scan.documents == 0) {
    fail(ExitCode::kUsage,
         "no text in the input ({} empty files, {} that are no regular files); give other paths",
         scan.empty_files, scan.not_regular);
  }
  PrepareResult result;
  result.empty_files = scan.empty_files;
  result.not_regular = scan.not_regular;
  const CorpusManifest::Source source = source_of(options, kind, scan);
  if (folder.finished()) {
    require_same(folder, source);
    result.already_prepared = true;
  } else {
    CorpusManifest manifest = Preparation(options, kind, folder, inputs, scan, progress).run();
    *manifest.mutable_source() = source;
    write_file_durably(folder.file(kManifestName), manifest_json(manifest));
  }
  folder.end();
  return result;
}

}  // namespace birkhoff
