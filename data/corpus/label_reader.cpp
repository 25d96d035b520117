#include "data/corpus/label_reader.h"

#include "cluster/base/error.h"

namespace birkhoff {

void check_labels(const Corpus& corpus, const std::string& split, const std::string& record) {
  if (corpus.record(split, record).class_name_size() > 0) return;
  fail(ExitCode::kData,
       "{}: record '{}' of split '{}' holds no labels, because it names no classes; name a record "
       "that does",
       corpus.folder().string(), record, split);
}

LabelReader::LabelReader(const Corpus& corpus, const std::string& split, const std::string& record)
    : shards_(corpus, corpus.record(split, record)),
      num_classes_(corpus.record(split, record).class_name_size()) {
  check_labels(corpus, split, record);
}

void LabelReader::read(std::int64_t from, std::int64_t count, std::int64_t* out) {
  thread_local std::vector<std::uint16_t> values;
  values.resize(static_cast<std::size_t>(count));
  shards_.read_bytes(from, count, reinterpret_cast<char*>(values.data()));
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = values[static_cast<std::size_t>(i)];
    if (out[i] < num_classes_) continue;
    fail(ExitCode::kData,
         "{}: the label of document {} is {}, not below the {} classes; prepare the corpus again",
         shards_.file_of(from + i), from + i, out[i], num_classes_);
  }
}

}  // namespace birkhoff
