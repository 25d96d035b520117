// Subwords as tokens, by the SentencePiece library (Kudo & Richardson 2018). The library's headers
// and its own Protobuf stay in the .cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

// content: a SentencePiece model. Error(kData) names `file` if the library rejects it.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& content,
                                                        const std::string& file,
                                                        std::int64_t vocabulary);

struct SentencePieceModel {
  std::int64_t num_pieces = 0;
  std::int64_t end_of_document = -1;  // the model's </s>; -1 = it has none
};
// Loads the model in a sandboxed child process first, because the library has crashed on damaged
// models.
SentencePieceModel check_sentencepiece_model(const std::string& content, const std::string& file);

// A sample of lines. Its memory is bounded, and the same text yields the same sample. A line is
// kept if the hash of its number ends in `level` zero bits, and the level rises whenever the sample
// is full. Lines longer than 2048 bytes are cut; the parts count as lines.
class LineSampler {
 public:
  // max_bytes: memory for the lines and their containers.
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

// Trains byte-pair merges (Sennrich et al. 2016) with a byte fallback and no normalization, so that
// decoding restores any UTF-8 text (except that U+2581, SentencePiece's mark for a space, becomes a
// space). Ids: 0 unknown, 1 </s>. Deterministic. Error(kUsage) if the text does not yield
// vocab_size pieces.
std::string train_sentencepiece(const std::vector<std::string>& lines, std::int64_t vocab_size);

}  // namespace birkhoff
