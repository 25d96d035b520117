// Documents of a stream as rows of a batch, and their lengths.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {

// Reads documents into rows of `length` tokens: longer documents are cut, shorter ones are padded
// with 0. Several threads may read at once.
class DocumentRows {
 public:
  DocumentRows(const Corpus& corpus, const std::string& split, const std::string& stream,
               std::int64_t length);
  std::int64_t documents() const { return reader_.documents(); }
  std::int64_t length() const { return length_; }
  // Writes document i to row[0, length) and returns the number of its tokens there, at least 1.
  // Error(kData) if the corpus is damaged.
  std::int64_t read(std::int64_t i, std::int64_t* row);
  // That number.
  std::int64_t length_of(std::int64_t i);
  // The number of all tokens of document i.
  std::int64_t whole_length_of(std::int64_t i);
  // Writes only the first `count` tokens of document i, and nothing behind them.
  void read_first(std::int64_t i, std::int64_t count, std::int64_t* row);

 private:
  StreamReader reader_;
  std::int64_t length_;
};

// The lengths of a stream's documents in tokens, in order. Reads document ends in chunks, so that
// memory does not depend on their number.
class DocumentLengths {
 public:
  DocumentLengths(const Corpus& corpus, const std::string& split, const std::string& stream);
  // nullopt after the last.
  std::optional<std::int64_t> next();

 private:
  StreamReader reader_;
  std::int64_t read_to_ = 0;  // the ends up to this token have been read
  std::vector<std::int64_t> ends_;
  std::size_t next_ = 0;  // in ends_
  std::int64_t begin_ = 0;
};

// The number of documents of each length in tokens.
std::map<std::int64_t, std::int64_t> document_lengths(const Corpus& corpus,
                                                      const std::string& split,
                                                      const std::string& stream);

// Error(kData) if the split has no document.
void check_has_documents(const Corpus& corpus, const std::string& split);

}  // namespace birkhoff
