#include "data/corpus/shard_writer.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// This limit keeps a shard of tiny documents from being larger than a shard of long ones.
constexpr std::size_t kMaxShardDocuments = 1 << 20;

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
  require(dtype != CorpusManifest::f32, "dtype of token ids");
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
    if (buffered() == shard_tokens_ || ends_.size() >= kMaxShardDocuments) write_tokens();
    const std::int64_t count = std::min(total - done, shard_tokens_ - buffered());
    const std::size_t at = values_.size();
    values_.resize(at + static_cast<std::size_t>(count * element_bytes_));
    const std::int32_t* from = ids.data() + done;
    if (element_bytes_ == 1) narrow_into<std::uint8_t>(from, count, values_.data() + at);
    if (element_bytes_ == 2) narrow_into<std::uint16_t>(from, count, values_.data() + at);
    if (element_bytes_ == 4) narrow_into<std::int32_t>(from, count, values_.data() + at);
    done += count;
  }
}

void StreamWriter::end_document() {
  ends_.push_back(static_cast<std::uint64_t>(entry_.elements() + buffered()));
}

void StreamWriter::write_tokens() {
  const std::string file =
      fmt::format("{}-{}-{:05}.h5", split_, entry_.name(), entry_.shard_size());
  const CorpusManifest::Shard shard = write_shard(folder_, file, entry_, values_, &ends_);
  *entry_.add_shard() = shard;
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
