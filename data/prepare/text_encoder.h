// The encoding of a corpus's text, and the writing of its shards, on one rank or several.
//
// Tokenizing is what takes time, so it is divided; every rank reads all of the text and counts it.
// The text is cut into bundles of kBundleBytes, and of each N bundles in a row, rank r of N encodes
// the r-th. Then the ranks exchange the ids, so each of them has the whole stream, and writes every
// N-th shard. Nothing that is written depends on N.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/record_writer.h"
#include "data/corpus/shard_writer.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/text_counts.h"
#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

class TextEncoder {
 public:
  static constexpr std::int64_t kBundleBytes = 1 << 20;

  struct Options {
    std::string folder;
    std::array<bool, 3> has_split = {};
    std::int64_t shard_tokens = 0;
    // Of tables: the names of the classes, for a record `label` of each split. Else null.
    const std::vector<std::string>* class_names = nullptr;
  };
  // A stream of each split, and its tokenizer with the entry in the manifest.
  struct Stream {
    std::string name;
    const Tokenizer& tokenizer;
    const configs::CorpusManifest::Tokenizer& entry;
  };
  // streams: the tokenizer of the first is the corpus's, and the counts and the unknown text of a
  // split are those of its first stream. All arguments must outlive it.
  TextEncoder(const std::vector<Stream>& streams, const Options& options, ProcessGroup& ranks);

  // These three are collective: each rank passes the same. Error(kData) if a document has no tokens
  // and no end mark.
  //
  // The next part of the document in a stream, at byte `offset`. Error(kData) names document and
  // byte if the tokenizer cannot encode it.
  void add(SplitIndex split, std::size_t stream, const Document& document, std::string_view text,
           std::int64_t offset);
  // The document ends in all streams.
  // label: of a row of a table.
  void end_document(SplitIndex split, const Document& document, std::uint16_t label);
  // Writes the last shards. Adds the splits to the manifest of rank 0, and appends to `notes`.
  void finish(configs::CorpusManifest& manifest, std::vector<std::string>& notes);

 private:
  // What a bundle adds to a split.
  struct Encoded {
    std::vector<char> values;         // ids, in the dtype of the stream
    std::vector<std::uint64_t> ends;  // of documents, in bytes of `values`
    std::string unknown;
  };
  // A stream of a split.
  struct Ids {
    Ids(const Stream& of, StreamWriter to) : stream(of), writer(std::move(to)) {}

    const Stream& stream;
    StreamWriter writer;
    Encoded encoded;
    std::int64_t num_unknown = 0;       // unknown tokens that this rank has encoded
    std::size_t open_bytes = 0;         // written since the last end of a document
    std::deque<std::string> unwritten;  // ended documents, of a tokenizer without end mark
  };
  struct Output {
    std::vector<Ids> streams;                     // empty: there is no such split
    std::optional<RecordWriter> labels, unknown;  // on rank 0
    TextCounter counter;                          // of the first stream
  };

  bool is_mine() const { return bundle_ == ranks_.rank(); }
  static std::vector<std::int32_t> encode(const Tokenizer& tokenizer, const Document& document,
                                          std::string_view text, std::int64_t offset,
                                          std::string& unknown);
  void exchange();
  void write(const std::string& bundle);
  static void require_tokens(Ids& ids, std::size_t bytes);
  configs::CorpusManifest::Stream gathered_stream(Ids& ids);
  configs::CorpusManifest::Counts gathered_counts(const Output& output);
  std::int64_t gathered_unknown(const Ids& ids);
  std::string gathered_loss();

  const std::vector<Stream>& streams_;
  const Options& options_;
  ProcessGroup& ranks_;
  std::array<Output, 3> outputs_;
  int bundle_ = 0;                            // the rank that encodes the current one
  std::int64_t bundle_bytes_ = 0, part_ = 0;  // of the current bundle; of the text so far
  // The first part of this rank that the tokens do not give back, and its number.
  std::string lost_;
  std::int64_t lost_part_ = 0;
};

}  // namespace birkhoff
