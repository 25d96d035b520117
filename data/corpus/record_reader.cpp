#include "data/corpus/record_reader.h"

#include "cluster/base/error.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {

RecordReader::RecordReader(const Corpus& corpus, const configs::CorpusManifest::Record& record)
    : entry_(record),
      shards_(corpus.folder(), record.shard(), shard_format::row_bytes(record),
              shard_format::kRecordValues) {}

std::int64_t RecordReader::row_bytes() const { return shard_format::row_bytes(entry_); }

void RecordReader::read(std::int64_t from, std::int64_t count, void* out) {
  shards_.read_bytes(from, count, static_cast<char*>(out));
}

LabelReader::LabelReader(const Corpus& corpus, const std::string& split, const std::string& record)
    : record_(corpus, corpus.record(split, record)) {
  if (record_.entry().class_name_size() > 0) return;
  fail(ExitCode::kData,
       "{}: record '{}' of split '{}' holds no labels, because it names no classes; name a record "
       "that does",
       corpus.folder().string(), record, split);
}

void LabelReader::read(std::int64_t from, std::int64_t count, std::int64_t* out) {
  values_.resize(static_cast<std::size_t>(count));
  record_.read(from, count, values_.data());
  const int num_classes = record_.entry().class_name_size();
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = values_[static_cast<std::size_t>(i)];
    if (out[i] < num_classes) continue;
    fail(ExitCode::kData,
         "{}: the label of document {} is {}, not below the {} classes; prepare the corpus again",
         record_.file_of(from + i), from + i, out[i], num_classes);
  }
}

}  // namespace birkhoff
