// A corpus folder that `birkhoff prepare` made: its manifest, checked, and its tokenizer.
// docs/corpus_format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "configs/corpus_manifest.pb.h"

namespace birkhoff {

// Text to ids and back. Thread-safe after construction.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Ids of a text, without an end-of-document mark. Characters or words outside the vocabulary
  // become the unknown id.
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  // Text of ids; marks and unknown ids give a visible replacement or nothing, never an error. Ids
  // outside [0, vocabulary): Error(kData).
  virtual std::string decode(const std::vector<std::int32_t>& ids) const = 0;
  // The byte that an id stands for, if it stands for a single byte of text whatever that is: a
  // character may then take several ids. (SentencePiece has such ids for characters that it has no
  // piece for.)
  virtual std::optional<char> byte_of(std::int32_t) const { return std::nullopt; }
  virtual std::int64_t vocabulary() const = 0;
};

// kind: bytes, chars, words, sentencepiece; file: its vocabulary or model (unused for bytes). A
// damaged file: Error(kData).
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& kind,
                                          const std::filesystem::path& file,
                                          std::int64_t vocabulary);

class Corpus {
 public:
  // Reads and validates manifest.json, that every shard is there with its size, and the hash of the
  // tokenizer's file, which runs copy; opens no HDF5. Error(kData) says what is wrong. Its time
  // depends on the number of shards alone.
  explicit Corpus(std::filesystem::path folder);

  const std::filesystem::path& folder() const { return folder_; }
  const configs::CorpusManifest& manifest() const { return manifest_; }
  std::int64_t vocabulary() const { return manifest_.tokenizer().vocabulary(); }
  // The split or the stream of it; an Error(kData) names those there are.
  const configs::CorpusManifest::Split& split(std::string_view name) const;
  const configs::CorpusManifest::Stream& stream(std::string_view split,
                                                std::string_view name) const;
  bool has_split(std::string_view name) const;
  std::unique_ptr<Tokenizer> tokenizer() const;
  // Vocabulary or model file of the tokenizer, empty path for bytes.
  std::filesystem::path tokenizer_file() const;

 private:
  void check_tokenizer_file() const;

  std::filesystem::path folder_;
  configs::CorpusManifest manifest_;
};

// Re-reads every shard: page CRCs, ids below the vocabulary, document ends, file hash; and once all
// that is right everywhere, HDF5 structure in a limited child process. Error(kData) names the first
// difference: file and page, where it lies in one.
void verify_corpus(const Corpus& corpus);

}  // namespace birkhoff
