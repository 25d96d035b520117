#include "data/prepare/records/prepare_records.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_shards.h"
#include "data/corpus/shard_format.h"
#include "data/prepare/classes.h"
#include "data/prepare/corpus_source.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/input/split_rule.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_options.h"
#include "data/prepare/prepare_progress.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// So that the list of a shard's rows stays small.
constexpr std::int64_t kMaxShardRows = 1 << 16;

std::string counted_rows(const RecordInput& input, std::int64_t count) {
  return counted(count, input.nouns().row, input.nouns().rows);
}

int rank_of(const ProcessGroup* ranks) { return ranks == nullptr ? 0 : ranks->rank(); }

// The text identifies all that the shards depend on. What inspecting the files found may differ
// between commands and between ranks although the files are the same.
std::string identity_of(const CorpusManifest::Source& source, const RecordInput& input,
                        const Classes& classes) {
  std::string found = fmt::format("{}\n", fmt::join(classes.names(), "\n"));
  for (const auto& [reason, count] : input.damages().reasons) found += reason + "\n";
  return fmt::format("{}, input {}, {}, {} damaged, found {}", source.options(),
                     source.input_hash(), counted_rows(input, input.scan().documents),
                     input.damages().rows, xxh3_hex(found.data(), found.size()));
}

// One command, from found rows to manifest.
class RecordPreparation {
 public:
  RecordPreparation(const PrepareOptions& options, const RecordOptions& records,
                    const OutFolder& folder, RecordInput& input, const Classes& classes,
                    const CorpusManifest::Source& source, ProgressReports& progress,
                    ProcessGroup* ranks)
      : options_(options),
        ranks_(ranks),
        input_(input),
        classes_(classes),
        source_(source),
        progress_(progress),
        rule_(input.scan(), options.valid_fraction, options.test_fraction),
        row_bytes_(shard_format::row_bytes(input.record())),
        shard_rows_(
            std::min(shard_format::shard_rows(input.record(), records.shard_bytes), kMaxShardRows)),
        shards_(folder.path(), identity_of(source, input, classes), input.record(),
                labels_entry()) {
    if (rank_of(ranks_) == 0) folder.clear(shards_.resume());
    if (ranks_ == nullptr) return;
    shards_.set_finished(ranks_->broadcast_bytes(shards_.finished(), 0, "finished shards"));
    count_shards();
  }

  // The manifest is rank 0's.
  CorpusManifest run() {
    progress_.begin(fmt::format("read {}", input_.nouns().rows), input_.bytes());
    const InputScan now = input_.for_each([this](const InputRow& row) { take(row); });
    if (now.hash != input_.scan().hash || now.documents != input_.scan().documents) {
      fail(ExitCode::kData,
           "the input changed while it was read ({}, then {}); start the command again",
           counted_rows(input_, input_.scan().documents), counted_rows(input_, now.documents));
    }
    for (const SplitIndex split : kSplits) {
      if (!ranges_[split].wanted.empty()) finish(split);
    }
    progress_.end(true);
    CorpusManifest manifest = new_manifest();
    if (ranks_ != nullptr) ranks_->barrier("all shards are written");
    if (rank_of(ranks_) != 0) return manifest;
    *manifest.mutable_source() = source_;
    for (const SplitIndex split : kSplits) {
      if (!rule_.has(split)) continue;
      *manifest.add_split() = shards_.split(kSplitNames[split], ranges_[split].shard, damages_);
      if (manifest.split().rbegin()->counts().documents() == 0) {
        fail_as_empty(split, options_.paths.front(),
                      counted_rows(input_, input_.scan().documents) + " that can be read",
                      options_);
      }
    }
    return manifest;
  }

  // Of the rows that could not be read.
  const Damages& damages() const { return damages_; }

 private:
  // The rows of a split's next shard.
  struct Range {
    std::int64_t shard = 0, bytes = 0;
    std::vector<WantedRow> wanted;
    std::vector<std::string> labels;   // the classes that folders name; empty: the file says it
    std::vector<std::int64_t> shares;  // of the bytes
  };

  std::optional<CorpusManifest::Record> labels_entry() const {
    return input_.has_classes() ? std::optional(label_record(classes_.names())) : std::nullopt;
  }

  SplitIndex split_of(const InputRow& row) { return rule_.pieces(row.document).front().split; }

  // Each rank gets neighboring shards of each split, so that it reads few files of many rows.
  void count_shards() {
    std::array<std::int64_t, 3> rows = {};
    input_.for_each([&](const InputRow& row) { ++rows[split_of(row)]; });
    for (std::size_t i = 0; i < rows.size(); ++i)
      num_shards_[i] = (rows[i] + shard_rows_ - 1) / shard_rows_;
    rule_.reset();
  }

  bool is_mine(SplitIndex split, std::int64_t shard) const {
    return ranks_ == nullptr || shard * ranks_->size() / num_shards_[split] == ranks_->rank();
  }

  void take(const InputRow& row) {
    const SplitIndex split = split_of(row);
    Range& range = ranges_[split];
    range.wanted.push_back(row.wanted);
    range.labels.emplace_back(row.document.label);
    range.shares.push_back(row.bytes);
    range.bytes += row.bytes;
    if (std::ssize(range.wanted) == shard_rows_) finish(split);
  }

  // Writes the split's next shard, unless it is finished.
  void finish(SplitIndex split) {
    Range& range = ranges_[split];
    if (ranks_ != nullptr && range.shard >= num_shards_[split]) {
      fail(ExitCode::kData, "{} has more {} than when they were counted; start the command again",
           options_.paths.front(), input_.nouns().rows);
    }
    if (!is_mine(split, range.shard) || shards_.is_finished(kSplitNames[split], range.shard)) {
      progress_.skip(range.bytes);
    } else {
      shards_.write(kSplitNames[split], range.shard, read(readers_[split], range));
    }
    const std::int64_t next = range.shard + 1;
    range = {};
    range.shard = next;
  }

  ShardRows read(std::unique_ptr<RowReader>& reader, const Range& range) {
    if (!reader) reader = input_.reader();
    ShardRows rows;
    rows.values.reserve(range.wanted.size() * static_cast<std::size_t>(row_bytes_));
    reader->read(range.wanted, [&](std::size_t i, const ReadRow& row) {
      progress_.add(range.shares[i]);
      if (!row.damage.empty()) return input_.damaged(row.damage, rows.damages);
      require(std::ssize(row.values) == row_bytes_, "a row has the bytes of its record");
      rows.values.insert(rows.values.end(), row.values.begin(), row.values.end());
      if (!input_.has_classes()) return;
      Document labeled;
      labeled.shown_path = range.wanted[i].path;
      labeled.label = range.labels[i].empty() ? row.label : range.labels[i];
      rows.labels.push_back(static_cast<std::uint16_t>(classes_.value_of(labeled)));
    });
    return rows;
  }

  const PrepareOptions& options_;
  ProcessGroup* const ranks_;
  RecordInput& input_;
  const Classes& classes_;
  const CorpusManifest::Source& source_;
  ProgressReports& progress_;
  SplitRule rule_;
  const std::int64_t row_bytes_, shard_rows_;
  RecordShards shards_;
  std::array<std::int64_t, 3> num_shards_ = {};  // of each split, with several ranks
  std::array<Range, 3> ranges_;
  std::array<std::unique_ptr<RowReader>, 3> readers_;
  Damages damages_;
};

CorpusManifest::Source source_of(const PrepareOptions& options, const RecordOptions& records,
                                 const RecordInput& input) {
  const std::string classes = fmt::format("{}", fmt::join(options.class_names, "\n"));
  CorpusManifest::Source source;
  source.set_options(fmt::format(
      "{}{}{}, {}, shard bytes {}{}", input.describe(), records.labels ? "" : ", unlabeled",
      records.skip_damaged ? ", damaged skipped" : "", shares_text(options), records.shard_bytes,
      classes.empty() ? "" : ", classes " + xxh3_hex(classes.data(), classes.size())));
  source.set_input_hash(input.scan().hash);
  return source;
}

void add_notes(const RecordInput& input, const Damages& damages, std::vector<std::string>& notes) {
  for (const auto& [reason, count] : damages.reasons) {
    notes.push_back(
        fmt::format("skipped {}{}", reason,
                    count == 1 ? "" : fmt::format(" ({})", counted_rows(input, count))));
  }
  if (damages.rows > 1)
    notes.push_back(fmt::format("skipped {} in all", counted_rows(input, damages.rows)));
}

}  // namespace

PrepareResult prepare_records(
    const PrepareOptions& given, const RecordOptions& records, const RecordNouns& nouns,
    const std::function<std::unique_ptr<RecordInput>(const RecordInput::Context&)>& make_input,
    const std::function<void(const PrepareProgress&)>& callback, ProcessGroup* ranks) {
  const PrepareOptions options = checked_paths(given);
  const std::vector<InputPath> inputs = inputs_of(options);
  OutFolder folder(options.out);
  require_no_streams(
      inputs, fmt::format("{} cannot come through a pipe; give files or folders", nouns.rows));
  for (const InputPath& input : inputs) folder.require_outside(input.path);
  ProgressReports progress(callback, 1);
  const bool is_first = rank_of(ranks) == 0;
  if (is_first) folder.begin();
  Classes classes(options.class_names, nouns.row, nouns.doubt);
  const std::unique_ptr<RecordInput> made = make_input({inputs, folder, classes, progress});
  RecordInput& input = *made;
  // Rank 0 goes first, so that one rank reports what all of them find.
  const auto wait = [&] { ranks->barrier("rank 0 has found the input"); };
  if (!is_first) wait();
  input.find();
  if (is_first && ranks != nullptr) wait();
  PrepareResult result;
  result.notes = input.notes();
  result.not_regular = input.scan().not_regular;
  if (input.scan().documents == 0 && input.damages().rows > 0) {
    fail(ExitCode::kData,
         "{}: none of {} can be read; the first: {}; repair it or give other paths",
         inputs.front().path, counted(input.damages().rows, "file"),
         input.damages().reasons.begin()->first);
  }
  require_documents(input.scan(), options, nouns.rows);
  if (!options.class_names.empty() && !input.has_classes()) {
    fail(ExitCode::kUsage, "{}: no {} has a class, but --like gives {}; leave --like out",
         inputs.front().path, nouns.row,
         counted(std::ssize(options.class_names), "class", "classes"));
  }
  const CorpusManifest::Source source = source_of(options, records, input);
  const bool is_finished = ranks == nullptr
                               ? folder.finished()
                               : agree_on_input(*ranks, identity_of(source, input, classes),
                                                folder.finished(), nouns.rows);
  if (is_finished && is_first) {
    require_same(folder, source, nouns.rows,
                 fmt::format("of {} only the times are recorded", nouns.rows),
                 [](const auto&) { return false; });
    result.already_prepared = true;
  } else if (!is_finished) {
    RecordPreparation preparation(options, records, folder, input, classes, source, progress,
                                  ranks);
    const CorpusManifest manifest = preparation.run();
    if (!is_first) return result;
    Damages damages = preparation.damages();
    damages.add(input.damages());
    add_notes(input, damages, result.notes);
    write_file_durably(folder.file(kCorpusManifestName), manifest_json(manifest));
  }
  folder.end();
  return result;
}

}  // namespace birkhoff
