#include "data/images/image_shards.h"

#include <fmt/ranges.h>

#include <sstream>
#include <stdexcept>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "configs/loader/checksummed_json.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// A note names the damages of a shard, so it may be long.
constexpr std::int64_t kMaxNoteBytes = 64 << 20;

constexpr char kNotePrefix[] = ".finished-";

std::string note_name(const std::string& split, std::int64_t shard) {
  return fmt::format("{}{}-{:05}", kNotePrefix, split, shard);
}

}  // namespace

ImageShards::ImageShards(std::string folder, std::string source, CorpusManifest::Record image,
                         std::optional<CorpusManifest::Record> label)
    : folder_(std::move(folder)), source_(std::move(source)) {
  *empty_.add_record() = std::move(image);
  if (label) *empty_.add_record() = std::move(*label);
}

// A note has a line "COUNT REASON" for each damage, then a manifest of one split in JSON.
std::optional<ImageShards::Note> ImageShards::read_note(const std::string& name) const {
  const std::string path = folder_ + "/" + name;
  if (!path_exists(path)) return std::nullopt;
  std::string text = read_file(path, kMaxNoteBytes);
  Note note;
  while (!text.starts_with('{')) {
    const std::size_t end = text.find('\n'), space = text.find(' ');
    if (end == std::string::npos || space > end) return std::nullopt;
    note.damages[text.substr(space + 1, end - space - 1)] =
        parse_number<std::int64_t>(std::string_view(text).substr(0, space)).value_or(1);
    text.erase(0, end + 1);
  }
  CorpusManifest manifest;
  try {
    parse_checksummed_json(text, Checksum::kRequired, manifest);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
  if (manifest.source().options() != source_ || manifest.split_size() != 1) return std::nullopt;
  note.split = manifest.split(0);
  return note;
}

bool ImageShards::has_files_of(const Note& note) const {
  for (const auto& record : note.split.record()) {
    for (const auto& shard : record.shard()) {
      const std::string path = folder_ + "/" + shard.file();
      if (!path_exists(path) || xxh3_hex(File::open_for_read(path)) != shard.hash()) return false;
    }
  }
  return true;
}

std::set<std::string> ImageShards::resume() {
  std::set<std::string> files;
  for (const std::string& name : list_directory(folder_)) {
    if (!name.starts_with(kNotePrefix)) continue;
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

std::string ImageShards::finished() const { return fmt::format("{}", fmt::join(finished_, "\n")); }

void ImageShards::set_finished(const std::string& text) {
  std::istringstream names(text);
  for (std::string name; std::getline(names, name);) finished_.insert(name);
}

bool ImageShards::is_finished(const std::string& split, std::int64_t shard) const {
  return finished_.contains(note_name(split, shard));
}

void ImageShards::write(const std::string& split, std::int64_t shard,
                        const ShardImages& images) const {
  CorpusManifest manifest;
  manifest.mutable_source()->set_options(source_);
  CorpusManifest::Split& made = *manifest.add_split();
  made = empty_;
  const auto write_rows = [&](CorpusManifest::Record& record, const std::vector<char>& rows) {
    const std::string file = fmt::format("{}-{}-{:05}.h5", split, record.name(), shard);
    *record.add_shard() = write_shard(folder_, file, record, rows, nullptr);
  };
  if (!images.pixels.empty()) {
    write_rows(*made.mutable_record(0), images.pixels);
    if (made.record_size() > 1) {
      const char* labels = reinterpret_cast<const char*>(images.labels.data());
      write_rows(*made.mutable_record(1),
                 {labels, labels + images.labels.size() * sizeof images.labels[0]});
    }
  }
  std::string note;
  for (const auto& [reason, count] : images.damages) note += fmt::format("{} {}\n", count, reason);
  write_file_durably(folder_ + "/" + note_name(split, shard), note + checksummed_json(manifest));
}

CorpusManifest::Split ImageShards::split(const std::string& split, std::int64_t num_shards,
                                         ImageDamages& damages) const {
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
    for (const auto& [reason, count] : note->damages) damages[reason] += count;
  }
  whole.mutable_counts()->set_documents(whole.record(0).rows());
  return whole;
}

}  // namespace birkhoff
