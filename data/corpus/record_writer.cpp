#include "data/corpus/record_writer.h"

#include <cstring>

#include "cluster/base/error.h"
#include "data/corpus/shard_file.h"

namespace birkhoff {

using configs::CorpusManifest;

RecordWriter::RecordWriter(std::string folder, std::string split, std::string record,
                           const std::vector<std::string>& class_names, std::int64_t shard_rows)
    : RecordWriter(std::move(folder), std::move(split), std::move(record), shard_rows) {
  entry_.set_dtype(CorpusManifest::u16);
  for (const std::string& name : class_names) entry_.add_class_name(name);
}

RecordWriter::RecordWriter(std::string folder, std::string split, std::string record,
                           std::int64_t shard_rows)
    : folder_(std::move(folder)), split_(std::move(split)), shard_rows_(shard_rows) {
  entry_.set_name(std::move(record));
  entry_.set_dtype(CorpusManifest::u8);
  entry_.set_rows(0);
}

void RecordWriter::append(std::int64_t label) {
  require(label >= 0 && label < entry_.class_name_size(), "a label below the number of classes");
  const auto value = static_cast<std::uint16_t>(label);
  append_row(&value, sizeof value);
}

void RecordWriter::append_bytes(std::string_view bytes) {
  for (const char& byte : bytes) append_row(&byte, sizeof byte);
}

void RecordWriter::append_row(const void* row, std::size_t bytes) {
  const std::size_t at = values_.size();
  values_.resize(at + bytes);
  std::memcpy(values_.data() + at, row, bytes);
  entry_.set_rows(entry_.rows() + 1);
  if (entry_.rows() % shard_rows_ == 0) write_rows();
}

void RecordWriter::write_rows() {
  const std::string file =
      fmt::format("{}-{}-{:05}.h5", split_, entry_.name(), entry_.shard_size());
  *entry_.add_shard() = write_shard(folder_, file, entry_.dtype(), values_, nullptr);
  values_.clear();
}

CorpusManifest::Record RecordWriter::finish() {
  if (!values_.empty()) write_rows();
  return entry_;
}

}  // namespace birkhoff
