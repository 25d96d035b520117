#include "data/corpus/shard_file.h"

#include <algorithm>
#include <cstring>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

void append_page_crcs(const void* data, std::int64_t bytes, std::vector<std::uint32_t>& crcs) {
  constexpr std::int64_t kPageBytes = shard_format::kPageBytes;
  const auto* begin = static_cast<const char*>(data);
  for (std::int64_t at = 0; at < bytes; at += kPageBytes) {
    crcs.push_back(crc32c(begin + at, static_cast<std::size_t>(std::min(kPageBytes, bytes - at))));
  }
}

// Writes to a temporary file, syncs it, reads it back, compares its hash, and renames it.
void write_checked(const std::string& path, const std::string& bytes, const std::string& hash) {
  const std::string aside = path + ".tmp";
  remove_tree(aside);
  File file = File::create(aside);
  file.write_all(bytes);
  file.sync();
  file.close();
  if (xxh3_hex(File::open_for_read(aside)) != hash) {
    fail(ExitCode::kStorage,
         "{}: the bytes read back differ from those written; check the disk and start the command "
         "again",
         aside);
  }
  rename_path(aside, path);
}

Hdf5Type hdf5_type(CorpusManifest::Dtype dtype) {
  switch (dtype) {
    case CorpusManifest::u8:
      return Hdf5Type::kU8;
    case CorpusManifest::u16:
      return Hdf5Type::kU16;
    case CorpusManifest::i32:
      return Hdf5Type::kI32;
    case CorpusManifest::f32:
      return Hdf5Type::kF32;
  }
  require(false, "dtype of a shard");
  return {};
}

// The values of a shard, with the name that a stream or a record gives them.
template <typename Array>
Hdf5DataSet values_set(const CorpusManifest::Shard& shard, const Array& array, const char* name) {
  Hdf5DataSet set{name, hdf5_type(array.dtype()), {shard.elements()}};
  set.shape.insert(set.shape.end(), array.shape().begin(), array.shape().end());
  set.offset = shard.values_offset();
  return set;
}

Hdf5DataSet page_crcs_set(const CorpusManifest::Shard& shard) {
  return {shard_format::kPageCrcs,
          Hdf5Type::kU32,
          {shard.page_crcs_bytes() / 4},
          nullptr,
          shard.page_crcs_offset()};
}

}  // namespace

std::vector<Hdf5DataSet> shard_data_sets(const CorpusManifest::Shard& shard,
                                         const CorpusManifest::Stream& stream) {
  return {values_set(shard, stream, shard_format::kValues),
          {shard_format::kDocumentEnds,
           Hdf5Type::kU64,
           {shard.documents()},
           nullptr,
           shard.documents_offset()},
          page_crcs_set(shard)};
}

std::vector<Hdf5DataSet> shard_data_sets(const CorpusManifest::Shard& shard,
                                         const CorpusManifest::Record& record) {
  return {values_set(shard, record, shard_format::kRecordValues), page_crcs_set(shard)};
}

template <typename Array>
CorpusManifest::Shard write_shard(const std::string& folder, const std::string& file,
                                  const Array& array, const std::vector<char>& values,
                                  const std::vector<std::uint64_t>* ends) {
  const auto values_bytes = static_cast<std::int64_t>(values.size());
  const auto documents = ends == nullptr ? 0 : static_cast<std::int64_t>(ends->size());
  CorpusManifest::Shard shard;
  shard.set_page_bytes(shard_format::kPageBytes);
  std::vector<std::uint32_t> page_crcs;
  append_page_crcs(values.data(), values_bytes, page_crcs);
  if (ends != nullptr) append_page_crcs(ends->data(), documents * 8, page_crcs);

  shard.set_file(file);
  shard.set_elements(values_bytes / shard_format::row_bytes(array));
  shard.set_documents(documents);
  shard.set_values_bytes(values_bytes);
  shard.set_documents_bytes(documents * 8);
  shard.set_page_crcs_bytes(static_cast<std::int64_t>(page_crcs.size()) * 4);
  shard.set_page_crcs_crc(crc32c(page_crcs.data(), page_crcs.size() * 4));

  std::vector<Hdf5DataSet> sets = shard_data_sets(shard, array);
  sets.front().data = values.data();
  if (ends != nullptr) sets[1].data = ends->data();
  sets.back().data = page_crcs.data();
  const std::string image = hdf5_image(sets);
  shard.set_values_offset(sets.front().offset);
  shard.set_documents_offset(ends == nullptr ? 0 : sets[1].offset);
  shard.set_page_crcs_offset(sets.back().offset);
  shard.set_bytes(static_cast<std::int64_t>(image.size()));
  shard.set_hash(xxh3_hex(image.data(), image.size()));
  require(std::memcmp(image.data() + shard.values_offset(), values.data(), values.size()) == 0,
          "HDF5 puts contiguous values at the offset it reports");
  write_checked(folder + "/" + file, image, shard.hash());
  return shard;
}

template CorpusManifest::Shard write_shard(const std::string&, const std::string&,
                                           const CorpusManifest::Stream&, const std::vector<char>&,
                                           const std::vector<std::uint64_t>*);
template CorpusManifest::Shard write_shard(const std::string&, const std::string&,
                                           const CorpusManifest::Record&, const std::vector<char>&,
                                           const std::vector<std::uint64_t>*);

}  // namespace birkhoff
