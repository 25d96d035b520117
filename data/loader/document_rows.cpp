#include "data/loader/document_rows.h"

#include <algorithm>

#include "cluster/base/error.h"

namespace birkhoff {

DocumentRows::DocumentRows(const Corpus& corpus, const std::string& split,
                           const std::string& stream, std::int64_t length)
    : reader_(corpus, split, stream), length_(length) {
  require(length_ >= 1, "sequence length");
}

std::int64_t DocumentRows::length_of(std::int64_t i) {
  return std::min(whole_length_of(i), length_);
}

std::int64_t DocumentRows::whole_length_of(std::int64_t i) {
  const auto [begin, end] = reader_.document(i);
  return end - begin;
}

void DocumentRows::read_first(std::int64_t i, std::int64_t count, std::int64_t* row) {
  reader_.read(reader_.document(i).first, count, row);
}

std::int64_t DocumentRows::read(std::int64_t i, std::int64_t* row) {
  const auto [begin, end] = reader_.document(i);
  const std::int64_t count = std::min(end - begin, length_);
  reader_.read(begin, count, row);
  std::fill(row + count, row + length_, 0);
  return count;
}

DocumentLengths::DocumentLengths(const Corpus& corpus, const std::string& split,
                                 const std::string& stream)
    : reader_(corpus, split, stream) {}

std::optional<std::int64_t> DocumentLengths::next() {
  constexpr std::int64_t kStretch = 1 << 20;
  while (next_ == ends_.size()) {
    if (read_to_ == reader_.elements()) return std::nullopt;
    const std::int64_t to = std::min(read_to_ + kStretch, reader_.elements());
    ends_ = reader_.document_ends(read_to_, to);
    next_ = 0;
    read_to_ = to;
  }
  const std::int64_t end = ends_[next_++], length = end - begin_;
  begin_ = end;
  return length;
}

std::map<std::int64_t, std::int64_t> document_lengths(const Corpus& corpus,
                                                      const std::string& split,
                                                      const std::string& stream) {
  DocumentLengths lengths(corpus, split, stream);
  std::map<std::int64_t, std::int64_t> counts;
  while (const auto length = lengths.next()) ++counts[*length];
  return counts;
}

void check_has_documents(const Corpus& corpus, const std::string& split) {
  if (corpus.split(split).counts().documents() > 0) return;
  fail(ExitCode::kData, "{}: split '{}' has no document; prepare more text",
       corpus.folder().string(), split);
}

}  // namespace birkhoff
