// Reads rows of a stream by byte offset, with pread instead of the HDF5 library. Each 64 KiB page
// is checked against its CRC32C the first time it is read. One thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "configs/corpus_manifest.pb.h"
#include "data/corpus/corpus.h"

namespace birkhoff {

// One shard file. The manifest's offsets must already be validated (data/corpus/manifest.h).
class ShardReader {
 public:
  // `begin`: the shard's first element within the stream.
  ShardReader(std::string path, const configs::CorpusManifest::Shard& shard,
              configs::CorpusManifest::Dtype dtype, std::int64_t begin);

  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return begin_ + shard_.elements(); }
  // Reads the ids of elements [from, from + count) of the stream, all within this shard. Returns
  // the largest of them; a negative id counts as 2^31 or more. Damaged pages: Error(kData).
  std::uint64_t read(std::int64_t from, std::int64_t count, std::int64_t* out);
  // Appends the document ends e in this shard with from < e <= to.
  void append_document_ends(std::int64_t from, std::int64_t to, std::vector<std::int64_t>& out);
  // Closes the file; the next read opens it again. Checked pages stay checked.
  void close();
  const std::string& path() const { return path_; }
  bool is_open() const { return file_.has_value(); }

 private:
  struct Region {
    const char* name;
    std::int64_t offset, bytes, first_page;
  };
  void open();
  void read_bytes(const Region& region, std::int64_t from, std::int64_t bytes, char* out);
  void check_page(const Region& region, std::int64_t page);
  std::uint64_t document_end(std::int64_t index);

  std::string path_;
  configs::CorpusManifest::Shard shard_;
  std::int64_t element_bytes_;
  std::int64_t begin_;
  Region values_, documents_;
  std::optional<File> file_;
  std::vector<std::uint32_t> page_crcs_;  // empty until the first open
  std::vector<bool> checked_;
  std::vector<char> buffer_;
};

// A whole stream of token ids.
class StreamReader {
 public:
  StreamReader(const Corpus& corpus, const std::string& split, const std::string& stream);
  std::int64_t elements() const { return elements_; }
  // Reads ids [from, from + count), across shards. Error(kData) if an id is not below the
  // vocabulary.
  void read(std::int64_t from, std::int64_t count, std::int64_t* out);
  // The document ends e (the position after a document's last token) with from < e <= to,
  // ascending.
  std::vector<std::int64_t> document_ends(std::int64_t from, std::int64_t to);

 private:
  // The shard that holds an element, which the caller then reads. Closes the open shards if this
  // one would be one too many.
  std::size_t shard_of(std::int64_t element);

  std::vector<ShardReader> shards_;
  std::int64_t elements_;
  std::int64_t vocabulary_;
  std::int64_t num_open_ = 0;
};

}  // namespace birkhoff
