// Text of ids that come one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

// Put together, what add() and finish() return is the text of all ids as Tokenizer::decode() gives
// it. Characters come whole: ids that are bytes of a character wait until it is complete.
class TextDecoder {
 public:
  // before: ids that the new ones follow; their text is not repeated. The tokenizer must outlive
  // the decoder.
  TextDecoder(const Tokenizer& tokenizer, const std::vector<std::int32_t>& before);

  // Text that is complete with this id; may be empty.
  std::string add(std::int32_t id);
  // What waits for bytes that no longer come.
  std::string finish();

 private:
  std::size_t num_unfinished() const;
  std::string take(std::size_t num_ids);

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> last_;     // the id before, if any: a text's first space may be dropped
  std::vector<std::int32_t> pending_;  // ids whose text was not returned yet
};

}  // namespace birkhoff
