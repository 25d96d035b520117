// Reads the rows of a record, as data/corpus/shard_reader.h reads streams. One thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {

// Rows of any dtype and shape.
class RecordReader {
 public:
  // Reads `record` of the corpus; neither needs to outlive the reader.
  RecordReader(const Corpus& corpus, const configs::CorpusManifest::Record& record);
  // The record's dtype, shape and class names.
  const configs::CorpusManifest::Record& entry() const { return entry_; }
  std::int64_t rows() const { return shards_.elements(); }
  std::int64_t row_bytes() const;
  // Copies rows [from, from + count), across shards, to `out`, count * row_bytes() bytes,
  // little-endian. Error(kData) names the file that is damaged.
  void read(std::int64_t from, std::int64_t count, void* out);
  // The file that holds a row.
  const std::string& file_of(std::int64_t row) const { return shards_.file_of(row); }

 private:
  const configs::CorpusManifest::Record entry_;
  ShardSequence shards_;
};

// The labels of a split, one per document.
class LabelReader {
 public:
  // Error(kData) if the record holds no labels.
  LabelReader(const Corpus& corpus, const std::string& split, const std::string& record);
  // The number of documents of the split.
  std::int64_t rows() const { return record_.rows(); }
  // Reads the labels of documents [from, from + count). Error(kData) names the file that is damaged
  // or holds a value that is not below the number of classes.
  void read(std::int64_t from, std::int64_t count, std::int64_t* out);

 private:
  RecordReader record_;
  std::vector<std::uint16_t> values_;
};

}  // namespace birkhoff
