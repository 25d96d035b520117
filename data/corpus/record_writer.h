// Writes rows of any dtype and shape to the shards of a record. The incomplete last shard is kept
// in memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

class RecordWriter {
 public:
  // Files are folder/<split>-<record>-<number>.h5. Existing files are replaced. `record` has a
  // name, a dtype, a shape (none: scalars) and, if rows are labels, class names.
  RecordWriter(std::string folder, std::string split, configs::CorpusManifest::Record record,
               std::int64_t shard_rows);
  // Appends rows: little-endian elements, in C order. Labels must be below the number of classes.
  void append(const void* rows, std::int64_t count);
  // Writes the last shard and returns the record's entry for the manifest.
  configs::CorpusManifest::Record finish();

 private:
  void write_rows();

  std::string folder_, split_;
  std::int64_t shard_rows_, row_bytes_;
  configs::CorpusManifest::Record entry_;  // of the rows so far
  std::vector<char> values_;               // of the current shard
};

}  // namespace birkhoff
