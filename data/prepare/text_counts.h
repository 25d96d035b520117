// Counts of bytes, characters, words and sentences in text that comes in parts, for metrics per
// byte, character and word, and of the text that its tokens lose.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"
#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

// Characters: bytes that begin a character in UTF-8. Words: runs of anything but ASCII white space.
// Sentences: lines that hold a word. The end of a document ends its last word and sentence.
class TextCounter {
 public:
  void add(std::string_view text);
  // Counts the tokens of a text that are the unknown id, and the text if it does not come back from
  // its tokens: sets unknown_tokens and the fields after it. ids, unknown: what the tokenizer
  // returns for the text. Returns the text that comes back from them if it differs by more than a
  // space in front.
  std::optional<std::string> add_tokens(const Tokenizer& tokenizer, std::string_view text,
                                        const std::vector<std::int32_t>& ids,
                                        const std::string& unknown);
  void end_document();
  const configs::CorpusManifest::Counts& counts() const { return counts_; }

 private:
  configs::CorpusManifest::Counts counts_;
  bool in_word_ = false, line_has_word_ = false;
};

// The difference between a text and the decoded text of its tokens: "newlines 12 -> 0, spaces 90 ->
// 85, capitals 7 -> 0".
std::string lost_text(std::string_view text, std::string_view back);

}  // namespace birkhoff
