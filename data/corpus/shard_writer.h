// The writer of a stream's token ids to shards. The incomplete last shard is kept in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

// Appends ids to values of the dtype, which they must fit.
void append_ids(const std::vector<std::int32_t>& ids, configs::CorpusManifest::Dtype dtype,
                std::vector<char>& values);

// If several ranks write a stream, each appends all of it and writes every `of`-th shard.
struct ShardShare {
  int rank = 0, of = 1;
};

class StreamWriter {
 public:
  // Files are folder/<split>-<stream>-<number>.h5; dtype u8, u16 or i32. Existing files are
  // replaced.
  StreamWriter(std::string folder, std::string split, std::string stream,
               configs::CorpusManifest::Dtype dtype, std::int64_t shard_tokens,
               ShardShare share = {});
  // Appends ids of the current document. They must fit the dtype.
  void append(const std::vector<std::int32_t>& ids);
  // The same, of values that append_ids() has made.
  void append_values(std::span<const char> values);
  // Ends the current document, which must not be empty.
  void end_document();
  // Writes the last shard and returns the stream's entry for the manifest. Of the shards that other
  // ranks write, it has only the numbers of elements and documents.
  configs::CorpusManifest::Stream finish();

 private:
  std::int64_t buffered() const {
    return static_cast<std::int64_t>(values_.size()) / element_bytes_;
  }
  void write_tokens();

  std::string folder_, split_;
  std::int64_t shard_tokens_, element_bytes_;
  ShardShare share_;
  configs::CorpusManifest::Stream entry_;  // of the shards written so far
  std::vector<char> values_;               // of the current shard
  std::vector<std::uint64_t> ends_;        // of the documents that end in it
};

}  // namespace birkhoff
