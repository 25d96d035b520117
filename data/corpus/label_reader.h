// Reads the labels of documents, as data/corpus/shard_reader.h reads streams. Several threads may
// read at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {

// Error(kData) if the split lacks the record, or if the record names no classes, so that its values
// are not labels. Opens no file of the corpus.
void check_labels(const Corpus& corpus, const std::string& split, const std::string& record);

// The labels of a split, one per document.
class LabelReader {
 public:
  // Errors as check_labels().
  LabelReader(const Corpus& corpus, const std::string& split, const std::string& record);
  // The number of documents of the split.
  std::int64_t rows() const { return shards_.elements(); }
  // Reads the labels of documents [from, from + count). Error(kData) names the file that is damaged
  // or holds a value that is not below the number of classes.
  void read(std::int64_t from, std::int64_t count, std::int64_t* out);
  void will_read(std::int64_t from, std::int64_t count) { shards_.will_read(from, count); }

 private:
  ShardSequence shards_;
  int num_classes_;
};

}  // namespace birkhoff
