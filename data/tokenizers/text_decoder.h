// A decoder of ids that come one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

// Concatenated, the results of add() and finish() are the text that Tokenizer::decode() returns for
// all ids. Characters are never split: ids that are bytes of a character wait until it is complete.
class TextDecoder {
 public:
  // before: the ids before the new ones; their text is not repeated. The tokenizer must outlive the
  // decoder.
  TextDecoder(const Tokenizer& tokenizer, const std::vector<std::int32_t>& before);

  // Returns the text that this id completes; it may be empty.
  std::string add(std::int32_t id);
  // Returns the text of ids that are still waiting for bytes.
  std::string finish();

 private:
  std::size_t num_unfinished() const;
  std::string take(std::size_t num_ids);

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> last_;     // the previous id, if any: decoding may drop a first space
  std::vector<std::int32_t> pending_;  // ids whose text has not been returned yet
};

}  // namespace birkhoff
