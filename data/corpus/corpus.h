// A corpus folder that `birkhoff prepare` made: its manifest, checked, and its tokenizer.
// docs/corpus_format.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "configs/corpus_manifest.pb.h"
#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

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

}  // namespace birkhoff
