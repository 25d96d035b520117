// Writes labels or bytes to the shards of a record. The incomplete last shard is kept in memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "configs/corpus_manifest.pb.h"

namespace birkhoff {

class RecordWriter {
 public:
  // Files are folder/<split>-<record>-<number>.h5. Existing files are replaced. class_names: of the
  // labels 0, 1, ...; at most kMaxClasses.
  RecordWriter(std::string folder, std::string split, std::string record,
               const std::vector<std::string>& class_names, std::int64_t shard_rows);
  // The same for bytes, each a row.
  RecordWriter(std::string folder, std::string split, std::string record, std::int64_t shard_rows);
  // Appends the label of the next document. It must be below the number of classes.
  void append(std::int64_t label);
  void append_bytes(std::string_view bytes);
  // Writes the last shard and returns the record's entry for the manifest.
  configs::CorpusManifest::Record finish();

 private:
  void append_row(const void* row, std::size_t bytes);
  void write_rows();

  std::string folder_, split_;
  std::int64_t shard_rows_;
  configs::CorpusManifest::Record entry_;  // of the shards written so far
  std::vector<char> values_;               // of the current shard
};

}  // namespace birkhoff
