// The file of a shard: its data sets, and its checked write to disk. The same for streams and
// records, except that records have no document ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "configs/corpus_manifest.pb.h"
#include "data/corpus/hdf5.h"

namespace birkhoff {

// The data sets of a shard with this entry, without their values. dtype: not f32.
// has_documents: it is a shard of a stream.
std::vector<Hdf5DataSet> shard_data_sets(const configs::CorpusManifest::Shard& shard,
                                         configs::CorpusManifest::Dtype dtype, bool has_documents);

// Writes folder/file, replacing an existing file, and returns its entry. values: the bytes of the
// elements. ends: the document ends of a stream's shard; nullptr: the shard is a record's.
configs::CorpusManifest::Shard write_shard(const std::string& folder, const std::string& file,
                                           configs::CorpusManifest::Dtype dtype,
                                           const std::vector<char>& values,
                                           const std::vector<std::uint64_t>* ends);

}  // namespace birkhoff
