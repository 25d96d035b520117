// Subwords by the SentencePiece library (Kudo & Richardson 2018). Its headers and its own Protobuf
// stay in the .cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

// content: a SentencePiece model. Error(kData) names `file` if the library refuses it.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& content,
                                                        const std::string& file,
                                                        std::int64_t vocabulary);

struct SentencePieceModel {
  std::int64_t num_pieces = 0;
  std::int64_t end_of_document = -1;  // the model's </s>; -1 = it has none
};
// The library has crashed on damaged models: they are first loaded in a limited child process.
SentencePieceModel check_sentencepiece_model(const std::string& content, const std::string& file);

// A sample of lines, bounded in memory and the same for the same text: a line is kept if the hash
// of its number ends in `level` zero bits, and the level rises whenever the sample is full. Longer
// lines than 2048 bytes are cut; the parts count as lines.
class LineSampler {
 public:
  // max_bytes: of the lines and of what holds them.
  explicit LineSampler(std::int64_t max_bytes) : max_bytes_(max_bytes) {}
  // text: whole lines, or parts of very long ones.
  void add(std::string_view text);
  std::vector<std::string> lines() const;

 private:
  struct Line {
    std::uint64_t hash;
    std::string text;
  };
  std::vector<Line> lines_;
  std::int64_t max_bytes_, bytes_ = 0;
  std::uint64_t num_seen_ = 0;
  int level_ = 0;
};

// Trains byte-pair merges (Sennrich et al. 2016) with a byte fallback and no normalisation, so that
// any UTF-8 text comes back from decoding as it was (but U+2581, SentencePiece's mark of a space,
// comes back as a space). Ids: 0 unknown, 1 </s>. Deterministic. Error(kUsage) if the text does not
// yield vocab_size pieces.
std::string train_sentencepiece(const std::vector<std::string>& lines, std::int64_t vocab_size);

}  // namespace birkhoff
