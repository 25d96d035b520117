// Lines of text as the ids that a model reads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizers/tokenizer.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

// Error(kData) with `place` if the text cannot be encoded; unless reads_bytes, it must be UTF-8.
std::vector<std::int32_t> ids_of(const std::string& text, const std::string& place,
                                 const Tokenizer& tokenizer, bool reads_bytes);

// Reads sources of a translation model as its corpus holds them: with an end mark, if they have
// one, and cut to their first max_tokens ids.
class SourceReader {
 public:
  SourceReader(const CheckpointFolder& checkpoint, std::int64_t max_tokens);

  struct Source {
    std::vector<std::int32_t> ids;
    std::int64_t num_cut = 0;  // ids that are left out
  };
  // Error(kData) as ids_of(), and if there are no ids.
  Source read(const std::string& text, const std::string& place) const;

 private:
  std::unique_ptr<Tokenizer> tokenizer_;
  bool reads_bytes_ = false;
  std::optional<std::int32_t> end_mark_;
  std::int64_t max_tokens_;
};

}  // namespace birkhoff
