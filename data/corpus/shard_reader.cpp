#include "data/corpus/shard_reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <ranges>
#include <type_traits>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/instruction_set.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

// Below the usual limit of 1024 open files, which other parts of the process share.
constexpr std::int64_t kMaxOpenShards = 256;

// Longer reads are checked in parts of this size, whole pages of any size, so that memory stays
// small.
constexpr std::int64_t kPartBytes = shard_format::kMaxPageBytes;

// Returns the largest id; a negative id counts as a large one.
template <typename Id>
[[gnu::always_inline]] inline std::uint64_t widen_loop(const Id* ids, std::int64_t count,
                                                       std::int64_t* out) {
  using Unsigned = std::make_unsigned_t<Id>;
  Unsigned largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = ids[i];
    largest = std::max(largest, static_cast<Unsigned>(ids[i]));
  }
  return largest;
}

// The same loop for current instruction sets: it is as fast as reading from memory.
#if defined(__x86_64__)
template <typename Id>
[[gnu::target("avx2")]] std::uint64_t widen_avx2(const Id* ids, std::int64_t count,
                                                 std::int64_t* out) {
  return widen_loop(ids, count, out);
}
#endif
template <typename Id>
std::uint64_t widen(const std::vector<char>& bytes, std::int64_t count, std::int64_t* out) {
  const auto* ids = reinterpret_cast<const Id*>(bytes.data());
#if defined(__x86_64__)
  if (instruction_set() >= InstructionSet::kAvx2) return widen_avx2(ids, count, out);
#endif
  return widen_loop(ids, count, out);
}

}  // namespace

ShardReader::ShardReader(std::string path, const configs::CorpusManifest::Shard& shard,
                         std::int64_t element_bytes, const char* values, std::int64_t begin,
                         std::int64_t first_document, std::shared_ptr<const StagedShards> staged)
    : path_(std::move(path)),
      shard_(shard),
      element_bytes_(element_bytes),
      page_bytes_(shard_format::page_bytes(shard)),
      begin_(begin),
      first_document_(first_document),
      values_{values, shard.values_offset(), shard.values_bytes(), 0},
      documents_{shard_format::kDocumentEnds, shard.documents_offset(), shard.documents_bytes(),
                 shard_format::num_pages(shard.values_bytes(), page_bytes_)},
      staged_(std::move(staged)),
      copy_(staged_ ? staged_->find(shard.file()) : nullptr) {}

ShardReader::Opened ShardReader::open(const std::string& path, bool is_copy) {
  File file = File::open_for_read(path, ExitCode::kData);
  if (file.size() != shard_.bytes()) {
    fail(ExitCode::kData,
         "{}: the file has {} bytes, the manifest says {}; prepare the corpus again", path,
         file.size(), shard_.bytes());
  }
  if (page_crcs_.empty()) {
    std::vector<std::uint32_t> table(static_cast<std::size_t>(shard_.page_crcs_bytes() / 4));
    file.pread_exact(table.data(), table.size() * 4, shard_.page_crcs_offset());
    if (crc32c(table.data(), table.size() * 4) != shard_.page_crcs_crc()) {
      fail(ExitCode::kData,
           "{}: the page table at byte {} is damaged; prepare the corpus again or restore the file",
           path, shard_.page_crcs_offset());
    }
    page_crcs_ = std::move(table);
  }
  if (is_copy) return {std::move(file), true, std::make_shared<CheckedPages>(page_crcs_.size())};
  if (!checked_) checked_ = std::make_shared<CheckedPages>(page_crcs_.size());
  return {std::move(file), false, checked_};
}

std::shared_ptr<const ShardReader::Opened> ShardReader::opened() {
  const std::lock_guard lock(mutex_);
  const bool has_copy = copy_ != nullptr && copy_->is_usable;
  if (file_ && (file_->is_copy || !has_copy)) return file_;
  if (has_copy) {
    try {
      file_ = std::make_shared<const Opened>(open(copy_->path, true));
      return file_;
    } catch (const Error& error) {
      discard(*copy_, error.what());
    }
  }
  if (!file_) file_ = std::make_shared<const Opened>(open(path_, false));
  return file_;
}

void ShardReader::close() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) file_.reset();
}

void ShardReader::check_page(const Opened& from_file, const Region& region, std::int64_t page,
                             const char* bytes) const {
  const std::int64_t from = page * page_bytes_;
  const auto slot = static_cast<std::size_t>(region.first_page + page);
  const auto size = static_cast<std::size_t>(std::min(page_bytes_, region.bytes - from));
  if (crc32c(bytes, size) != page_crcs_[slot]) {
    fail(ExitCode::kData,
         "{}: page {} of /{} ({} KiB at byte {}) is damaged; prepare the corpus again or restore "
         "the file",
         from_file.file.path(), page, region.name, page_bytes_ >> 10, region.offset + from);
  }
  from_file.checked->insert(slot);
}

void ShardReader::read_part(const Opened& from_file, const Region& region, std::int64_t from,
                            std::int64_t bytes, char* out) const {
  const std::int64_t first = from / page_bytes_, last = (from + bytes - 1) / page_bytes_;
  const std::int64_t begin = first * page_bytes_;
  const std::int64_t end = std::min((last + 1) * page_bytes_, region.bytes);
  const auto slot = [&](std::int64_t page) {
    return static_cast<std::size_t>(region.first_page + page);
  };
  const auto is_checked = [&](std::int64_t page) {
    return from_file.checked->contains(slot(page));
  };
  // Whole pages go straight into the caller's memory. Which of them are unchecked is looked up
  // after the read: the bits and checksums arrive from memory meanwhile.
  const bool is_whole = begin == from && end == from + bytes;
  if (is_whole) {
    from_file.checked->prefetch(slot(first));
  } else if (std::ranges::all_of(std::views::iota(first, last + 1), is_checked)) {
    from_file.file.pread_exact(out, static_cast<std::size_t>(bytes), region.offset + from);
    return;
  }
  __builtin_prefetch(&page_crcs_[slot(first)]);
  thread_local std::vector<char> memory;
  if (!is_whole) memory.resize(static_cast<std::size_t>(end - begin));
  char* const pages = is_whole ? out : memory.data();
  from_file.file.pread_exact(pages, static_cast<std::size_t>(end - begin), region.offset + begin);
  for (std::int64_t page = first; page <= last; ++page) {
    if (!is_checked(page))
      check_page(from_file, region, page, pages + (page * page_bytes_ - begin));
  }
  if (!is_whole) std::memcpy(out, pages + (from - begin), static_cast<std::size_t>(bytes));
}

void ShardReader::read_region(const Region& region, std::int64_t from, std::int64_t bytes,
                              char* out) {
  require(0 <= from && 0 < bytes && bytes <= region.bytes && from <= region.bytes - bytes,
          "bytes outside a shard");
  while (true) {
    const std::shared_ptr<const Opened> file = opened();
    try {
      for (std::int64_t at = from; at < from + bytes;) {
        const std::int64_t part = std::min(from + bytes, (at / kPartBytes + 1) * kPartBytes) - at;
        read_part(*file, region, at, part, out + (at - from));
        at += part;
      }
      return;
    } catch (const Error& error) {
      if (!file->is_copy) throw;
      discard(*copy_, error.what());
      const std::lock_guard lock(mutex_);
      if (file_ == file) file_.reset();
    }
  }
}

void ShardReader::read_bytes(std::int64_t from, std::int64_t count, char* out) {
  read_region(values_, (from - begin_) * element_bytes_, count * element_bytes_, out);
}

void ShardReader::will_read(std::int64_t from, std::int64_t count) {
  const std::int64_t begin = (from - begin_) * element_bytes_ / page_bytes_ * page_bytes_;
  const std::int64_t end = (from - begin_ + count) * element_bytes_;
  opened()->file.will_read(static_cast<std::size_t>(end - begin), values_.offset + begin);
}

std::uint64_t ShardReader::read(std::int64_t from, std::int64_t count, std::int64_t* out) {
  thread_local std::vector<char> ids;
  ids.resize(static_cast<std::size_t>(count * element_bytes_));
  read_bytes(from, count, ids.data());
  switch (element_bytes_) {
    case 1:
      return widen<std::uint8_t>(ids, count, out);
    case 2:
      return widen<std::uint16_t>(ids, count, out);
    default:
      return widen<std::int32_t>(ids, count, out);
  }
}

std::uint64_t ShardReader::document_end(std::int64_t document) {
  std::uint64_t end = 0;
  read_region(documents_, (document - first_document_) * 8, 8, reinterpret_cast<char*>(&end));
  return end;
}

std::int64_t ShardReader::document_behind(std::int64_t element) {
  std::int64_t document = first_document_;
  for (std::int64_t high = document + shard_.documents(); document < high;) {
    const std::int64_t middle = document + (high - document) / 2;
    if (document_end(middle) <= static_cast<std::uint64_t>(element)) {
      document = middle + 1;
    } else {
      high = middle;
    }
  }
  return document;
}

void ShardReader::append_document_ends(std::int64_t from, std::int64_t to,
                                       std::vector<std::int64_t>& out) {
  const std::int64_t past = first_document_ + shard_.documents();
  for (std::int64_t document = document_behind(from); document < past; ++document) {
    const std::uint64_t end = document_end(document);
    if (end > static_cast<std::uint64_t>(to)) return;
    out.push_back(static_cast<std::int64_t>(end));
  }
}

template <typename Array>
ShardSequence::ShardSequence(const Corpus& corpus, const Array& array, const char* values)
    : element_bytes_(shard_format::row_bytes(array)) {
  for (const auto& shard : array.shard()) {
    shards_.emplace_back((corpus.folder() / shard.file()).string(), shard, element_bytes_, values,
                         elements_, documents_, corpus.staged());
    begins_.push_back(elements_);
    first_documents_.push_back(documents_);
    elements_ += shard.elements();
    documents_ += shard.documents();
  }
  is_open_.resize(shards_.size());
}

ShardSequence::ShardSequence(const Corpus& corpus, const configs::CorpusManifest::Stream& stream)
    : ShardSequence(corpus, stream, shard_format::kValues) {}

ShardSequence::ShardSequence(const Corpus& corpus, const configs::CorpusManifest::Record& record)
    : ShardSequence(corpus, record, shard_format::kRecordValues) {}

std::size_t ShardSequence::shard_of(std::int64_t element) const {
  const auto next = std::ranges::upper_bound(begins_, element);
  return static_cast<std::size_t>(next - begins_.begin()) - 1;
}

std::size_t ShardSequence::shard_of_document(std::int64_t document) const {
  const auto next = std::ranges::upper_bound(first_documents_, document);
  return static_cast<std::size_t>(next - first_documents_.begin()) - 1;
}

ShardReader& ShardSequence::for_reading(std::size_t shard) {
  const std::lock_guard lock(mutex_);
  if (!is_open_[shard]) {
    if (num_open_ == kMaxOpenShards) {
      for (ShardReader& open : shards_) open.close();
      std::fill(is_open_.begin(), is_open_.end(), false);
      num_open_ = 0;
    }
    is_open_[shard] = true;
    ++num_open_;
  }
  return shards_[shard];
}

const std::string& ShardSequence::file_of(std::int64_t element) const {
  return shards_[shard_of(element)].path();
}

const std::string& ShardSequence::file_of_document(std::int64_t document) const {
  return shards_[shard_of_document(document)].path();
}

template <typename Read>
void ShardSequence::for_each_part(std::int64_t from, std::int64_t count, const Read& read) {
  require(from >= 0 && count >= 0 && from <= elements_ - count, "elements outside the shards");
  for (const std::int64_t end = from + count; from < end;) {
    ShardReader& shard = for_reading(shard_of(from));
    const std::int64_t part = std::min(end, shard.end()) - from;
    read(shard, from, part);
    from += part;
  }
}

void ShardSequence::read_bytes(std::int64_t from, std::int64_t count, char* out) {
  for_each_part(from, count, [&](ShardReader& shard, std::int64_t first, std::int64_t part) {
    shard.read_bytes(first, part, out + (first - from) * element_bytes_);
  });
}

void ShardSequence::will_read(std::int64_t from, std::int64_t count) {
  for_each_part(from, count, [](ShardReader& shard, std::int64_t first, std::int64_t part) {
    shard.will_read(first, part);
  });
}

std::uint64_t ShardSequence::read(std::int64_t from, std::int64_t count, std::int64_t* out) {
  std::uint64_t largest = 0;
  for_each_part(from, count, [&](ShardReader& shard, std::int64_t first, std::int64_t part) {
    largest = std::max(largest, shard.read(first, part, out + (first - from)));
  });
  return largest;
}

std::vector<std::int64_t> ShardSequence::document_ends(std::int64_t from, std::int64_t to) {
  std::vector<std::int64_t> ends;
  // A document ends in the shard that holds its last token, so the end e is in the shard of element
  // e - 1.
  const std::size_t last = shard_of(std::min(to, elements_) - 1);
  for (std::size_t shard = shard_of(from); shard <= last; ++shard)
    for_reading(shard).append_document_ends(from, to, ends);
  return ends;
}

std::uint64_t ShardSequence::document_end(std::int64_t document) {
  return for_reading(shard_of_document(document)).document_end(document);
}

std::int64_t ShardSequence::document_of(std::int64_t element) {
  return for_reading(shard_of(element)).document_behind(element);
}

StreamReader::StreamReader(const Corpus& corpus, const std::string& split,
                           const std::string& stream)
    : shards_(corpus, corpus.stream(split, stream)),
      vocabulary_(corpus.tokenizer_entry(stream).vocabulary()) {
  const auto& entry = corpus.stream(split, stream);
  if (entry.dtype() == configs::CorpusManifest::f32 || entry.shape_size() > 0) {
    fail(ExitCode::kData,
         "{}: stream '{}' of split '{}' holds no token ids; name a stream that does in task",
         corpus.folder().string(), stream, split);
  }
}

void StreamReader::read(std::int64_t from, std::int64_t count, std::int64_t* out) {
  const std::uint64_t largest = shards_.read(from, count, out);
  if (largest < static_cast<std::uint64_t>(vocabulary_)) return;
  for (std::int64_t i = 0; i < count; ++i) {
    if (out[i] < 0 || out[i] >= vocabulary_) {
      fail(ExitCode::kData,
           "{}: token {} of the stream is id {}, not below the vocabulary of {}; prepare the "
           "corpus again",
           shards_.file_of(from + i), from + i, out[i], vocabulary_);
    }
  }
}

std::vector<std::int64_t> StreamReader::document_ends(std::int64_t from, std::int64_t to) {
  if (from >= to) return {};
  return shards_.document_ends(from, to);
}

std::pair<std::int64_t, std::int64_t> StreamReader::document(std::int64_t i) {
  require(0 <= i && i < documents(), "a document of the stream");
  const std::uint64_t begin = i == 0 ? 0 : shards_.document_end(i - 1);
  const std::uint64_t end = shards_.document_end(i);
  if (begin >= end || end > static_cast<std::uint64_t>(elements())) {
    fail(ExitCode::kData, "{}: document {} is tokens [{}, {}) of {}; prepare the corpus again",
         shards_.file_of_document(i), i, begin, end, elements());
  }
  return {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)};
}

}  // namespace birkhoff
