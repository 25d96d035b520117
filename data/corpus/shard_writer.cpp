#include "data/corpus/shard_writer.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// This limit keeps a shard of tiny documents from being larger than a shard of long ones.
constexpr std::size_t kMaxShardDocuments = 1 << 20;

template <typename Id>
void append_as(const std::vector<std::int32_t>& ids, std::vector<char>& values) {
  const std::size_t at = values.size();
  values.resize(at + ids.size() * sizeof(Id));
  std::copy(ids.begin(), ids.end(), reinterpret_cast<Id*>(values.data() + at));
}

}  // namespace

void append_ids(const std::vector<std::int32_t>& ids, CorpusManifest::Dtype dtype,
                std::vector<char>& values) {
  switch (shard_format::dtype_bytes(dtype)) {
    case 1:
      return append_as<std::uint8_t>(ids, values);
    case 2:
      return append_as<std::uint16_t>(ids, values);
    default:
      return append_as<std::int32_t>(ids, values);
  }
}

StreamWriter::StreamWriter(std::string folder, std::string split, std::string stream,
                           CorpusManifest::Dtype dtype, std::int64_t shard_tokens, ShardShare share)
    : folder_(std::move(folder)),
      split_(std::move(split)),
      shard_tokens_(shard_tokens),
      element_bytes_(shard_format::dtype_bytes(dtype)),
      share_(share) {
  require(dtype != CorpusManifest::f32, "dtype of token ids");
  entry_.set_name(std::move(stream));
  entry_.set_dtype(dtype);
  entry_.set_elements(0);
  entry_.set_documents(0);
}

void StreamWriter::append(const std::vector<std::int32_t>& ids) {
  std::vector<char> values;
  append_ids(ids, entry_.dtype(), values);
  append_values(values);
}

void StreamWriter::append_values(std::span<const char> values) {
  while (!values.empty()) {
    // A full shard is written only when the next token arrives, so that the end of a document is in
    // the shard of its last token.
    if (buffered() == shard_tokens_ || ends_.size() >= kMaxShardDocuments) write_tokens();
    const auto room = static_cast<std::size_t>((shard_tokens_ - buffered()) * element_bytes_);
    const auto part = values.first(std::min(values.size(), room));
    values_.insert(values_.end(), part.begin(), part.end());
    values = values.subspan(part.size());
  }
}

void StreamWriter::end_document() {
  ends_.push_back(static_cast<std::uint64_t>(entry_.elements() + buffered()));
}

void StreamWriter::write_tokens() {
  const int number = entry_.shard_size();
  CorpusManifest::Shard& shard = *entry_.add_shard();
  if (number % share_.of == share_.rank) {
    shard = write_shard(folder_, shard_file_name(split_, entry_.name(), number), entry_, values_,
                        &ends_);
  } else {
    shard.set_elements(buffered());
    shard.set_documents(std::ssize(ends_));
  }
  entry_.set_elements(entry_.elements() + shard.elements());
  entry_.set_documents(entry_.documents() + shard.documents());
  values_.clear();
  ends_.clear();
}

CorpusManifest::Stream StreamWriter::finish() {
  if (!values_.empty()) write_tokens();
  return entry_;
}

}  // namespace birkhoff
