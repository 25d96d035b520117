// Readers of streams' elements and records' rows by byte offset, with pread instead of the HDF5
// library. Each page is checked against its CRC32C the first time it is read: a read takes the
// pages that hold its bytes, at most one page more at each end. A shard's page table is read as a
// whole when the shard is first opened: it has a checksum of its own, and is 1/1024 of the data.
// Several threads may read at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/files/file.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/corpus.h"

namespace birkhoff {

// One shard file. The manifest's offsets must already be validated (data/corpus/manifest.h).
class ShardReader {
 public:
  // element_bytes: of an element of a stream or a row of a record. values: the name of their data
  // set, for messages. begin, first_document: the shard's first element, and the first document
  // that ends in it, within the stream or record. staged: copies to read instead; may be null.
  ShardReader(std::string path, const configs::CorpusManifest::Shard& shard,
              std::int64_t element_bytes, const char* values, std::int64_t begin,
              std::int64_t first_document, std::shared_ptr<const StagedShards> staged);

  std::int64_t end() const { return begin_ + shard_.elements(); }
  // Copies elements [from, from + count), all within this shard. Damaged pages: Error(kData).
  void read_bytes(std::int64_t from, std::int64_t count, char* out);
  // Asks the system to read the pages of these elements in the background.
  void will_read(std::int64_t from, std::int64_t count);
  // As read_bytes() for token ids of 1, 2 or 4 bytes, widened. Returns the largest of them; a
  // negative id counts as 2^31 or more.
  std::uint64_t read(std::int64_t from, std::int64_t count, std::int64_t* out);
  // Appends the document ends e in this shard with from < e <= to.
  void append_document_ends(std::int64_t from, std::int64_t to, std::vector<std::int64_t>& out);
  // The first document of this shard whose end is greater than this position; one more than the
  // last if there is none.
  std::int64_t document_behind(std::int64_t element);
  // The end of a document that ends in this shard, by its number in the stream. Not validated.
  std::uint64_t document_end(std::int64_t document);
  // Closes the file, once no read uses it; the next read opens it again. Checked pages stay
  // checked. Does nothing while another thread opens it.
  void close();
  const std::string& path() const { return path_; }

 private:
  struct Region {
    const char* name;
    std::int64_t offset, bytes, first_page;
  };
  // Which pages are checked. A bit each, and for each group of pages how many are not checked yet:
  // the counts of a large corpus stay in the CPU's caches, its bits do not. Only these numbers pass
  // between threads, so their order does not matter.
  class CheckedPages {
   public:
    explicit CheckedPages(std::size_t pages)
        : words_((pages + 63) / 64), unchecked_((pages + kGroup - 1) / kGroup) {
      for (std::size_t page = 0; page < pages; page += kGroup)
        unchecked_[page / kGroup] = static_cast<std::uint32_t>(std::min(kGroup, pages - page));
    }
    bool contains(std::size_t page) const {
      return unchecked_[page / kGroup].load(std::memory_order_relaxed) == 0 ||
             (words_[page / 64].load(std::memory_order_relaxed) & bit(page)) != 0;
    }
    // Fetches the page's bit into the CPU's caches.
    void prefetch(std::size_t page) const { __builtin_prefetch(&words_[page / 64]); }
    void insert(std::size_t page) {
      if ((words_[page / 64].fetch_or(bit(page), std::memory_order_relaxed) & bit(page)) == 0)
        unchecked_[page / kGroup].fetch_sub(1, std::memory_order_relaxed);
    }

   private:
    static constexpr std::size_t kGroup = 4096;
    static std::uint64_t bit(std::size_t page) { return std::uint64_t{1} << page % 64; }

    std::vector<std::atomic<std::uint64_t>> words_;
    std::vector<std::atomic<std::uint32_t>> unchecked_;
  };
  struct Opened {
    File file;
    bool is_copy;
    std::shared_ptr<CheckedPages> checked;  // pages of this file
  };
  // Reads the page table, if that was not done. Call with mutex_.
  Opened open(const std::string& path, bool is_copy);
  // The file, opened if it is not, or if its copy is now usable. After that the page table does not
  // change.
  std::shared_ptr<const Opened> opened();
  void read_region(const Region& region, std::int64_t from, std::int64_t bytes, char* out);
  void read_part(const Opened& from_file, const Region& region, std::int64_t from,
                 std::int64_t bytes, char* out) const;
  void check_page(const Opened& from_file, const Region& region, std::int64_t page,
                  const char* bytes) const;

  std::string path_;
  configs::CorpusManifest::Shard shard_;
  std::int64_t element_bytes_, page_bytes_;
  std::int64_t begin_, first_document_;
  Region values_, documents_;
  std::shared_ptr<const StagedShards> staged_;  // owns the copy
  StagedShard* copy_;                           // null: there is none
  std::mutex mutex_;                            // guards the rest
  std::shared_ptr<const Opened> file_;          // null: closed
  std::shared_ptr<CheckedPages> checked_;       // of the corpus's file; null until the first open
  std::vector<std::uint32_t> page_crcs_;        // empty until the first open
};

// All shards of a stream or record of the corpus, one after another. The elements of a record, of
// any dtype and shape, are its rows. At most 256 shards are open. Neither the corpus nor the entry
// needs to outlive the object.
class ShardSequence {
 public:
  ShardSequence(const Corpus& corpus, const configs::CorpusManifest::Stream& stream);
  ShardSequence(const Corpus& corpus, const configs::CorpusManifest::Record& record);

  std::int64_t elements() const { return elements_; }
  std::int64_t documents() const { return documents_; }
  // As ShardReader's, across shards.
  void read_bytes(std::int64_t from, std::int64_t count, char* out);
  void will_read(std::int64_t from, std::int64_t count);
  std::uint64_t read(std::int64_t from, std::int64_t count, std::int64_t* out);
  // The document ends e with from < e <= to, ascending; from < to.
  std::vector<std::int64_t> document_ends(std::int64_t from, std::int64_t to);
  // The end of a document, by its number. Not validated.
  std::uint64_t document_end(std::int64_t document);
  // The number of the document that holds an element.
  std::int64_t document_of(std::int64_t element);
  // The file that holds an element, or the end of a document.
  const std::string& file_of(std::int64_t element) const;
  const std::string& file_of_document(std::int64_t document) const;

 private:
  // values: the data set of the elements.
  template <typename Array>
  ShardSequence(const Corpus& corpus, const Array& array, const char* values);
  // Calls read(shard, first element, number of elements) for the parts of [from, from + count).
  template <typename Read>
  void for_each_part(std::int64_t from, std::int64_t count, const Read& read);
  std::size_t shard_of(std::int64_t element) const;
  std::size_t shard_of_document(std::int64_t document) const;
  // The shard, which the caller then reads. Closes the open shards if this one would be one too
  // many.
  ShardReader& for_reading(std::size_t shard);

  std::deque<ShardReader> shards_;
  // The first element and document of each shard, where a search finds them in the CPU's cache.
  std::vector<std::int64_t> begins_, first_documents_;
  std::int64_t element_bytes_;
  std::int64_t elements_ = 0, documents_ = 0;
  std::mutex mutex_;  // guards the rest
  std::vector<bool> is_open_;
  std::int64_t num_open_ = 0;
};

// A whole stream of token ids.
class StreamReader {
 public:
  StreamReader(const Corpus& corpus, const std::string& split, const std::string& stream);
  std::int64_t elements() const { return shards_.elements(); }
  std::int64_t documents() const { return shards_.documents(); }
  // Reads ids [from, from + count), across shards. Error(kData) if an id is not below the
  // vocabulary.
  void read(std::int64_t from, std::int64_t count, std::int64_t* out);
  void will_read(std::int64_t from, std::int64_t count) { shards_.will_read(from, count); }
  // The document ends e (the position after a document's last token) with from < e <= to,
  // ascending.
  std::vector<std::int64_t> document_ends(std::int64_t from, std::int64_t to);
  // The tokens [begin, end) of document i, its end mark included; begin < end. Reads two document
  // ends, so memory does not depend on the number of documents. Error(kData) if they are not in
  // order.
  std::pair<std::int64_t, std::int64_t> document(std::int64_t i);
  // The number of the document that holds a token; documents() if a damaged corpus has none.
  std::int64_t document_of(std::int64_t token) { return shards_.document_of(token); }
  const std::string& file_of(std::int64_t token) const { return shards_.file_of(token); }

 private:
  ShardSequence shards_;
  std::int64_t vocabulary_;
};

}  // namespace birkhoff
