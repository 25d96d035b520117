#include "data/corpus/record_reader.h"

#include "cluster/base/error.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {

LabelReader::LabelReader(const Corpus& corpus, const std::string& split, const std::string& record)
    : shards_(corpus.folder(), corpus.record(split, record).shard(),
              corpus.record(split, record).dtype(), shard_format::kRecordValues),
      num_classes_(corpus.record(split, record).class_name_size()) {
  if (num_classes_ == 0) {
    fail(
        ExitCode::kData,
        "{}: record '{}' of split '{}' holds no labels, because it names no classes; name a record "
        "that does",
        corpus.folder().string(), record, split);
  }
}

void LabelReader::read(std::int64_t from, std::int64_t count, std::int64_t* out) {
  const std::uint64_t largest = shards_.read(from, count, out);
  if (largest < static_cast<std::uint64_t>(num_classes_)) return;
  for (std::int64_t i = 0; i < count; ++i) {
    if (out[i] < num_classes_) continue;
    fail(ExitCode::kData,
         "{}: the label of document {} is {}, not below the {} classes; prepare the corpus again",
         shards_.file_of(from + i), from + i, out[i], num_classes_);
  }
}

}  // namespace birkhoff
