// The file of a shard: its data sets, and its checked write to disk. The same for streams and
// records, except that records have no document ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/hdf5.h"

namespace birkhoff {

// The data sets of a shard of a stream or a record, without their values.
std::vector<Hdf5DataSet> shard_data_sets(const configs::CorpusManifest::Shard& shard,
                                         const configs::CorpusManifest::Stream& stream);
std::vector<Hdf5DataSet> shard_data_sets(const configs::CorpusManifest::Shard& shard,
                                         const configs::CorpusManifest::Record& record);

// Writes folder/file, replacing an existing file, and returns its entry. values: the bytes of the
// elements of a stream or the rows of a record (Array). ends: the ends of the documents that end in
// the shard; null for a record.
template <typename Array>
configs::CorpusManifest::Shard write_shard(const std::string& folder, const std::string& file,
                                           const Array& array, const std::vector<char>& values,
                                           const std::vector<std::uint64_t>* ends);

}  // namespace birkhoff
