// The shards of a corpus of records while `birkhoff prepare` makes them. Each shard is made of a
// range of its split's rows, so it depends on no other shard. A note tells that it is finished, so
// that a killed command continues with the next one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

// A file with this prefix is the note of a finished shard.
inline constexpr char kFinishedPrefix[] = ".finished-";

// The rows that could not be read.
struct Damages {
  static constexpr std::size_t kMaxReasons = 10;

  std::int64_t rows = 0;
  std::map<std::string, std::int64_t> reasons;  // the first ones: how many rows

  void add(const std::string& reason, std::int64_t count = 1);
  void add(const Damages& more);
};

// The rows of a shard, without those that could not be read.
struct ShardRows {
  std::vector<char> values;           // of the record
  std::vector<std::uint16_t> labels;  // if there is a record of labels
  Damages damages;
};

class RecordShards {
 public:
  // source: identifies the input and all options, in one line. record, label: the entries without
  // rows and shards.
  RecordShards(std::string folder, std::string source, configs::CorpusManifest::Record record,
               std::optional<configs::CorpusManifest::Record> label);

  // Finds the shards that an earlier command with the same source has finished, and whose files are
  // still what it wrote. Returns the names of these files and of their notes.
  std::set<std::string> resume();
  // What resume() found, as one text, and another rank's.
  std::string finished() const;
  void set_finished(const std::string& text);
  bool is_finished(const std::string& split, std::int64_t shard) const;
  // Writes the files of the shard, then its note.
  void write(const std::string& split, std::int64_t shard, const ShardRows& rows) const;
  // The split's entry for the manifest, of the shards 0, 1, ... to `num_shards`, which are
  // finished. Adds their damages to `damages`.
  configs::CorpusManifest::Split split(const std::string& split, std::int64_t num_shards,
                                       Damages& damages) const;

 private:
  struct Note {
    configs::CorpusManifest::Split split;  // a shard or none in each record
    Damages damages;
  };
  // nullopt: there is no valid one of this source. name: of its file.
  std::optional<Note> read_note(const std::string& name) const;
  bool has_files_of(const Note& note) const;

  std::string folder_, source_;
  std::set<std::string> finished_;        // the names of the notes that resume() found
  configs::CorpusManifest::Split empty_;  // its records
};

}  // namespace birkhoff
