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
  void end_document();
  const configs::CorpusManifest::Counts& counts() const { return counts_; }

 private:
  configs::CorpusManifest::Counts counts_;
  bool in_word_ = false, line_has_word_ = false;
};

// Counts the tokens that are the unknown id, and text that does not come back from its tokens.
class TokenCounts {
 public:
  // ids, unknown: what the tokenizer returns for the text. Returns the text that comes back from
  // them if it differs by more than a space in front.
  std::optional<std::string> add(const Tokenizer& tokenizer, std::string_view text,
                                 const std::vector<std::int32_t>& ids, const std::string& unknown);
  // Sets unknown_tokens and the fields after it.
  void write(configs::CorpusManifest::Counts& counts) const;

 private:
  std::int64_t unknown_tokens_ = 0, unknown_bytes_ = 0, changed_bytes_ = 0, added_spaces_ = 0;
};

// The difference between a text and the decoded text of its tokens: "newlines 12 -> 0, spaces 90 ->
// 85, capitals 7 -> 0".
std::string lost_text(std::string_view text, std::string_view back);

}  // namespace birkhoff
