// Constants of the shard format, shared by reader and writer. See docs/corpus_format.md.
#pragma once

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

// Values and document ends are checked page by page. A page is small enough that reading its first
// row costs little more than the row, and large enough that the table is 1/16384 of the data.
inline constexpr std::int64_t kPageBytes = 64 << 10;

// Valid for any number of bytes up to 2^63 - 1.
constexpr std::int64_t num_pages(std::int64_t bytes) {
  return bytes / kPageBytes + (bytes % kPageBytes > 0 ? 1 : 0);
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

}  // namespace birkhoff::shard_format
