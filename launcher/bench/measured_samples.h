// Samples that `bench loader` measures: their source, as a task reads them, and the location of
// their bytes in the files, for a plain loop over the same rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

// Sample i is elements [stride i, stride i + count) of a stream or record.
struct MeasuredSamples {
  std::string what;  // "windows of 1024 tokens"
  std::vector<std::filesystem::path> files;
  google::protobuf::RepeatedPtrField<configs::CorpusManifest::Shard> shards;  // of these files
  std::int64_t element_bytes = 0, stride = 0, count = 0, num_samples = 0;
  bool are_ids = false;  // integers, which batches hold as int64
  std::function<std::unique_ptr<SampleSource>()> make_source;
  // Checks a row of a batch of such a source. expected: count elements as they are in the files, or
  // int64 ids. Error(kInternal) names the first difference.
  std::function<void(const Batch& batch, std::int64_t row, const void* expected)> check_row;

  std::int64_t bytes() const { return count * element_bytes; }
};

// The windows of `length` tokens of the first stream of the split train.
MeasuredSamples measured_windows(const Corpus& corpus, std::int64_t length);
// The rows of a record of the split train; an empty name: of the one with the largest rows.
MeasuredSamples measured_rows(const Corpus& corpus, const std::string& record);

// Reads samples with one pread for each part in a shard: no checksum, no range check of ids, no
// batch. All shards are open.
class PlainReader {
 public:
  explicit PlainReader(const MeasuredSamples& samples);

  // The bytes of a sample, or of its ids as int64, at `out`.
  std::int64_t out_bytes() const { return count_ * (are_ids_ ? 8 : element_bytes_); }
  void read(std::int64_t sample, void* out);

 private:
  struct Shard {
    File file;
    std::int64_t begin, end, offset;
  };
  void widen(std::int64_t count, std::int64_t* out) const;

  std::vector<Shard> shards_;
  std::int64_t element_bytes_, stride_, count_;
  bool are_ids_;
  std::vector<char> bytes_;
};

// Removes the files from the page cache: what reads them next waits for the disk. Returns the share
// of their pages that stayed there, for instance because the file system keeps files in memory.
double drop_from_cache(const std::vector<std::filesystem::path>& files);

}  // namespace birkhoff
