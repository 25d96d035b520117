// Constants of the shard format, shared by reader and writer. See docs/corpus_format.md.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cluster/base/error.h"
#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff::shard_format {

inline constexpr char kManifestFormat[] = "birkhoff corpus";
inline constexpr std::int32_t kManifestVersion = 1;
inline constexpr std::int64_t kManifestMaxBytes = 64 << 20;

inline constexpr char kValues[] = "tokens";        // of a stream
inline constexpr char kRecordValues[] = "values";  // of a record
inline constexpr char kDocumentEnds[] = "document_ends";
inline constexpr char kPageCrcs[] = "page_crcs";

// Values and document ends are checked page by page. Samples are read in random order: the first
// read of one costs at most a page more at each end. The table is 1/1024 of the data.
inline constexpr std::int64_t kPageBytes = 4 << 10;
// Limits of the manifest's page_bytes, which is a power of two.
inline constexpr std::int64_t kMinPageBytes = 4 << 10, kMaxPageBytes = 1 << 20;

// Older manifests do not state the size.
inline constexpr std::int64_t kOlderPageBytes = 64 << 10;
inline std::int64_t page_bytes(const configs::CorpusManifest::Shard& shard) {
  return shard.has_page_bytes() ? shard.page_bytes() : kOlderPageBytes;
}

// Valid for any number of bytes up to 2^63 - 1.
constexpr std::int64_t num_pages(std::int64_t bytes, std::int64_t page_bytes) {
  return bytes / page_bytes + (bytes % page_bytes > 0 ? 1 : 0);
}

// The type of token ids below `vocabulary`: the smallest that holds them.
inline configs::CorpusManifest::Dtype id_dtype(std::int64_t vocabulary) {
  if (vocabulary <= 1 << 8) return configs::CorpusManifest::u8;
  return vocabulary <= 1 << 16 ? configs::CorpusManifest::u16 : configs::CorpusManifest::i32;
}

inline std::int64_t dtype_bytes(configs::CorpusManifest::Dtype dtype) {
  switch (dtype) {
    case configs::CorpusManifest::u8:
      return 1;
    case configs::CorpusManifest::u16:
      return 2;
    case configs::CorpusManifest::i32:
    case configs::CorpusManifest::f32:
      return 4;
  }
  require(false, "dtype of an array");
  return 0;
}

// Bytes of an element of a stream, or of a row of a record. The entry must be valid.
template <typename Array>
std::int64_t row_bytes(const Array& entry) {
  std::int64_t bytes = dtype_bytes(entry.dtype());
  for (const std::int64_t size : entry.shape()) bytes *= size;
  return bytes;
}

// A shard of a record of large rows, such as images, has at most this size. A writer keeps a shard
// in memory, and a reader reads its page table, 64 KiB, when it opens the shard. Readers keep 256
// shards open, 16 GiB.
inline constexpr std::int64_t kRecordShardBytes = 64 << 20;
inline std::int64_t shard_rows(const configs::CorpusManifest::Record& entry,
                               std::int64_t shard_bytes = kRecordShardBytes) {
  return std::max<std::int64_t>(1, shard_bytes / row_bytes(entry));
}

}  // namespace birkhoff::shard_format
