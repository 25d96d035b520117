#include "data/corpus/record_writer.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {

using configs::CorpusManifest;

RecordWriter::RecordWriter(std::string folder, std::string split, CorpusManifest::Record record,
                           std::int64_t shard_rows)
    : folder_(std::move(folder)),
      split_(std::move(split)),
      shard_rows_(shard_rows),
      row_bytes_(shard_format::row_bytes(record)),
      entry_(std::move(record)) {
  entry_.set_rows(0);
}

void RecordWriter::append(const void* rows, std::int64_t count) {
  const auto* next = static_cast<const char*>(rows);
  while (count > 0) {
    const std::int64_t part = std::min(count, shard_rows_ - entry_.rows() % shard_rows_);
    values_.insert(values_.end(), next, next + part * row_bytes_);
    entry_.set_rows(entry_.rows() + part);
    if (entry_.rows() % shard_rows_ == 0) write_rows();
    next += part * row_bytes_;
    count -= part;
  }
}

void RecordWriter::write_rows() {
  const std::string file = shard_file_name(split_, entry_.name(), entry_.shard_size());
  *entry_.add_shard() = write_shard(folder_, file, entry_, values_, nullptr);
  values_.clear();
}

CorpusManifest::Record RecordWriter::finish() {
  if (!values_.empty()) write_rows();
  return entry_;
}

}  // namespace birkhoff
