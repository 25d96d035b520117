#include "data/corpus/shard_writer.h"

#include <algorithm>
#include <cstring>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "data/corpus/hdf5.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using shard_format::kPageBytes;

// This limit keeps a shard of tiny documents from being larger than a shard of long ones.
constexpr std::size_t kMaxShardDocuments = 1 << 20;

void append_page_crcs(const void* data, std::int64_t bytes, std::vector<std::uint32_t>& crcs) {
  const auto* begin = static_cast<const char*>(data);
  for (std::int64_t at = 0; at < bytes; at += kPageBytes) {
    crcs.push_back(crc32c(begin + at, static_cast<std::size_t>(std::min(kPageBytes, bytes - at))));
  }
}

// Writes to a temporary file, syncs it, reads it back, compares its hash, and renames it.
void write_shard_file(const std::string& path, const std::string& bytes, const std::string& hash) {
  const std::string aside = path + ".tmp";
  remove_tree(aside);
  File file = File::create(aside);
  file.write_all(bytes);
  file.sync();
  file.close();
  const File written = File::open_for_read(aside);
  Xxh3Hasher hasher;
  std::vector<char> part(1 << 20);
  const std::int64_t size = written.size();
  for (std::int64_t at = 0; at < size; at += static_cast<std::int64_t>(part.size())) {
    const auto count = static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(part.size()), size - at));
    written.pread_exact(part.data(), count, at);
    hasher.update(part.data(), count);
  }
  if (hasher.hex_digest() != hash) {
    fail(ExitCode::kStorage,
         "{}: the bytes read back differ from those written; check the disk and start the command "
         "again",
         aside);
  }
  rename_path(aside, path);
}

template <typename Id>
void narrow_into(const std::int32_t* ids, std::int64_t count, char* out) {
  std::copy(ids, ids + count, reinterpret_cast<Id*>(out));
}

}  // namespace

StreamWriter::StreamWriter(std::string folder, std::string split, std::string stream,
                           CorpusManifest::Dtype dtype, std::int64_t shard_tokens)
    : folder_(std::move(folder)),
      split_(std::move(split)),
      shard_tokens_(shard_tokens),
      element_bytes_(shard_format::dtype_bytes(dtype)) {
  require(dtype == CorpusManifest::u16 || dtype == CorpusManifest::i32, "dtype of token ids");
  entry_.set_name(std::move(stream));
  entry_.set_dtype(dtype);
  entry_.set_elements(0);
  entry_.set_documents(0);
}

void StreamWriter::append(const std::vector<std::int32_t>& ids) {
  const auto total = static_cast<std::int64_t>(ids.size());
  for (std::int64_t done = 0; done < total;) {
    // A full shard is written only when the next token arrives, so that the end of a document is in
    // the shard of its last token.
    if (buffered() == shard_tokens_ || ends_.size() >= kMaxShardDocuments) write_shard();
    const std::int64_t count = std::min(total - done, shard_tokens_ - buffered());
    const std::size_t at = values_.size();
    values_.resize(at + static_cast<std::size_t>(count * element_bytes_));
    if (element_bytes_ == 2) {
      narrow_into<std::uint16_t>(ids.data() + done, count, values_.data() + at);
    } else {
      narrow_into<std::int32_t>(ids.data() + done, count, values_.data() + at);
    }
    done += count;
  }
}

void StreamWriter::end_document() {
  ends_.push_back(static_cast<std::uint64_t>(entry_.elements() + buffered()));
}

void StreamWriter::write_shard() {
  const std::int64_t elements = buffered();
  const auto documents = static_cast<std::int64_t>(ends_.size());
  std::vector<std::uint32_t> page_crcs;
  append_page_crcs(values_.data(), elements * element_bytes_, page_crcs);
  append_page_crcs(ends_.data(), documents * 8, page_crcs);
  const auto pages = static_cast<std::int64_t>(page_crcs.size());
  std::vector<Hdf5DataSet> data_sets = {
      {shard_format::kValues, element_bytes_ == 2 ? Hdf5Type::kU16 : Hdf5Type::kI32, elements,
       values_.data()},
      {shard_format::kDocumentEnds, Hdf5Type::kU64, documents, ends_.data()},
      {shard_format::kPageCrcs, Hdf5Type::kU32, pages, page_crcs.data()}};
  const std::string image = hdf5_image(data_sets);

  CorpusManifest::Shard& shard = *entry_.add_shard();
  shard.set_file(fmt::format("{}-{}-{:05}.h5", split_, entry_.name(), entry_.shard_size() - 1));
  shard.set_bytes(static_cast<std::int64_t>(image.size()));
  shard.set_hash(xxh3_hex(image.data(), image.size()));
  shard.set_elements(elements);
  shard.set_documents(documents);
  shard.set_values_offset(data_sets[0].offset);
  shard.set_values_bytes(elements * element_bytes_);
  shard.set_documents_offset(data_sets[1].offset);
  shard.set_documents_bytes(documents * 8);
  shard.set_page_crcs_offset(data_sets[2].offset);
  shard.set_page_crcs_bytes(pages * 4);
  shard.set_page_crcs_crc(crc32c(page_crcs.data(), page_crcs.size() * 4));
  require(std::memcmp(image.data() + shard.values_offset(), values_.data(), values_.size()) == 0,
          "HDF5 puts contiguous values at the offset it reports");
  write_shard_file(folder_ + "/" + shard.file(), image, shard.hash());

  entry_.set_elements(entry_.elements() + elements);
  entry_.set_documents(entry_.documents() + documents);
  values_.clear();
  ends_.clear();
}

CorpusManifest::Stream StreamWriter::finish() {
  if (!values_.empty()) write_shard();
  return entry_;
}

}  // namespace birkhoff
