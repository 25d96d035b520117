#include "data/corpus/record_shards.h"

#include <fmt/ranges.h>

#include <sstream>
#include <stdexcept>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "configs/loader/checksummed_json.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// Class names have at most 2 MiB, and paths 4,096 bytes; JSON may write six characters for one.
constexpr std::int64_t kMaxNoteBytes = 64 << 20;

std::string note_name(const std::string& split, std::int64_t shard) {
  return fmt::format("{}{}-{:05}", kFinishedPrefix, split, shard);
}

// A line with the number of rows, then a line "COUNT REASON" for each reason.
std::string damages_text(const Damages& damages) {
  std::string text = fmt::format("{}\n", damages.rows);
  for (const auto& [reason, count] : damages.reasons) text += fmt::format("{} {}\n", count, reason);
  return text;
}

Damages parse_damages(const std::string& text) {
  Damages damages;
  std::istringstream lines(text);
  lines >> damages.rows;
  std::int64_t count = 0;
  for (std::string reason; lines >> count && std::getline(lines.ignore(1), reason);)
    damages.reasons[reason] = count;
  return damages;
}

}  // namespace

void Damages::add(const std::string& reason, std::int64_t count) {
  rows += count;
  if (reasons.size() < kMaxReasons || reasons.contains(reason)) reasons[reason] += count;
}

void Damages::add(const Damages& more) {
  const std::int64_t all = rows + more.rows;
  for (const auto& [reason, count] : more.reasons) add(reason, count);
  rows = all;
}

RecordShards::RecordShards(std::string folder, std::string source, CorpusManifest::Record record,
                           std::optional<CorpusManifest::Record> label)
    : folder_(std::move(folder)), source_(std::move(source)) {
  *empty_.add_record() = std::move(record);
  if (label) *empty_.add_record() = std::move(*label);
}

// A note is a manifest of one split in JSON. Its options are the source, then the damages.
std::optional<RecordShards::Note> RecordShards::read_note(const std::string& name) const {
  const std::string path = folder_ + "/" + name;
  if (!path_exists(path)) return std::nullopt;
  CorpusManifest manifest;
  try {
    parse_checksummed_json(read_file(path, kMaxNoteBytes), Checksum::kRequired, manifest);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
  const std::string& options = manifest.source().options();
  if (!options.starts_with(source_ + "\n") || manifest.split_size() != 1 ||
      manifest.split(0).record_size() != empty_.record_size())
    return std::nullopt;
  return Note{manifest.split(0), parse_damages(options.substr(source_.size() + 1))};
}

bool RecordShards::has_files_of(const Note& note) const {
  for (const auto& record : note.split.record()) {
    for (const auto& shard : record.shard()) {
      const std::string path = folder_ + "/" + shard.file();
      if (!path_exists(path) || xxh3_hex(File::open_for_read(path)) != shard.hash()) return false;
    }
  }
  return true;
}

std::set<std::string> RecordShards::resume() {
  std::set<std::string> files;
  for (const std::string& name : list_directory(folder_)) {
    if (!name.starts_with(kFinishedPrefix)) continue;
    const std::optional<Note> note = read_note(name);
    if (!note || !has_files_of(*note)) continue;
    finished_.insert(name);
    files.insert(name);
    for (const auto& record : note->split.record()) {
      for (const auto& shard : record.shard()) files.insert(shard.file());
    }
  }
  return files;
}

std::string RecordShards::finished() const { return fmt::format("{}", fmt::join(finished_, "\n")); }

void RecordShards::set_finished(const std::string& text) {
  std::istringstream names(text);
  for (std::string name; std::getline(names, name);) finished_.insert(name);
}

bool RecordShards::is_finished(const std::string& split, std::int64_t shard) const {
  return finished_.contains(note_name(split, shard));
}

void RecordShards::write(const std::string& split, std::int64_t shard,
                         const ShardRows& rows) const {
  CorpusManifest manifest;
  manifest.mutable_source()->set_options(source_ + "\n" + damages_text(rows.damages));
  CorpusManifest::Split& made = *manifest.add_split();
  made = empty_;
  const auto write_values = [&](CorpusManifest::Record& record, const std::vector<char>& values) {
    const std::string file = shard_file_name(split, record.name(), shard);
    *record.add_shard() = write_shard(folder_, file, record, values, nullptr);
  };
  if (!rows.values.empty()) {
    write_values(*made.mutable_record(0), rows.values);
    if (made.record_size() > 1) {
      const char* labels = reinterpret_cast<const char*>(rows.labels.data());
      write_values(*made.mutable_record(1),
                   {labels, labels + rows.labels.size() * sizeof rows.labels[0]});
    }
  }
  write_file_durably(folder_ + "/" + note_name(split, shard), checksummed_json(manifest));
}

CorpusManifest::Split RecordShards::split(const std::string& split, std::int64_t num_shards,
                                          Damages& damages) const {
  CorpusManifest::Split whole = empty_;
  whole.set_name(split);
  for (auto& record : *whole.mutable_record()) record.set_rows(0);
  for (std::int64_t shard = 0; shard < num_shards; ++shard) {
    const std::string name = note_name(split, shard);
    const std::optional<Note> note = read_note(name);
    if (!note)
      fail(ExitCode::kStorage, "{}/{}: disappeared; start the command again", folder_, name);
    for (int i = 0; i < whole.record_size(); ++i) {
      CorpusManifest::Record& record = *whole.mutable_record(i);
      for (const auto& entry : note->split.record(i).shard()) {
        *record.add_shard() = entry;
        record.set_rows(record.rows() + entry.elements());
      }
    }
    damages.add(note->damages);
  }
  whole.mutable_counts()->set_documents(whole.record(0).rows());
  return whole;
}

}  // namespace birkhoff
