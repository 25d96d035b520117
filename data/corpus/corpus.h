// A corpus folder made by `birkhoff prepare`: its manifest, validated, and its tokenizers, which a
// corpus without streams lacks. See docs/corpus_format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/staged_shards.h"
#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

class Corpus {
 public:
  // Reads and validates manifest.json, and checks that every shard exists with its size and that
  // the tokenizers' files, which runs copy, have their hashes. Opens no HDF5 file; the time depends
  // only on the number of shards. Error(kData) says what is wrong.
  explicit Corpus(std::filesystem::path folder);

  const std::filesystem::path& folder() const { return folder_; }
  const configs::CorpusManifest& manifest() const { return manifest_; }
  bool has_tokenizer() const { return manifest_.has_tokenizer(); }
  // The number of token ids; 0 without a tokenizer.
  std::int64_t vocabulary() const { return manifest_.tokenizer().vocabulary(); }
  // The tokenizer of a stream, which is the same in all splits: its own, or the corpus's.
  const configs::CorpusManifest::Tokenizer& tokenizer_entry(std::string_view stream) const;
  // The split, or a stream or record of a split. If there is none, Error(kData) names the existing
  // ones.
  const configs::CorpusManifest::Split& split(std::string_view name) const;
  const configs::CorpusManifest::Stream& stream(std::string_view split,
                                                std::string_view name) const;
  const configs::CorpusManifest::Record& record(std::string_view split,
                                                std::string_view name) const;
  bool has_split(std::string_view name) const;
  // From now on, readers of the corpus use copies of its shards on this node's disk, as these are
  // made (staged_shards.h). Error(kStorage) if the folder cannot be used.
  void stage(const StageOptions& options);
  // Null: not staged.
  const std::shared_ptr<const StagedShards>& staged() const { return staged_; }
  // The corpus's tokenizer, and that of a stream. Error(kData) if the corpus has none.
  std::unique_ptr<Tokenizer> tokenizer() const;
  std::unique_ptr<Tokenizer> tokenizer(std::string_view stream) const;
  // The vocabulary or model file of the tokenizer; an empty path for bytes, and without one.
  std::filesystem::path tokenizer_file() const;
  std::filesystem::path tokenizer_file(std::string_view stream) const;

 private:
  std::filesystem::path file_of(const configs::CorpusManifest::Tokenizer& entry) const;
  void check_file_of(const configs::CorpusManifest::Tokenizer& entry) const;
  std::unique_ptr<Tokenizer> load(const configs::CorpusManifest::Tokenizer& entry) const;

  std::filesystem::path folder_;
  configs::CorpusManifest manifest_;
  std::shared_ptr<const StagedShards> staged_;
};

}  // namespace birkhoff
