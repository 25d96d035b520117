// The tokenizers of a corpus's streams while `prepare` makes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "data/prepare/prepare_options.h"
#include "data/tokenizers/known_tokenizer.h"

namespace birkhoff {

// One tokenizer for all streams, or one for each.
struct StreamTokenizers {
  std::vector<TokenizerOptions> options;
  std::vector<std::optional<KnownTokenizer>> known = {};  // nullopt: not learned yet

  std::size_t size() const { return options.size(); }
  // The index of a stream's tokenizer.
  std::size_t of_stream(std::size_t stream) const { return std::min(stream, size() - 1); }
  bool all_known() const {
    return std::ranges::all_of(known, [](const auto& one) { return one.has_value(); });
  }
  // The name of a tokenizer and, unless it is learned, its content, as the source of the corpus has
  // them. i: an index.
  std::string identity(std::size_t i) const;
};

// Reads the tokenizers that are not to be learned. If both streams have the same one, it is one
// tokenizer. Error(kData) about files that are none.
StreamTokenizers stream_tokenizers(std::vector<TokenizerOptions> options);

}  // namespace birkhoff
