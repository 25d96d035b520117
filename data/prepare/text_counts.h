// Counts the bytes, characters, words and sentences of text that comes in parts, for figures per
// byte, character and word.
#pragma once

#include <cstdint>
#include <string_view>

#include "configs/corpus_manifest.pb.h"

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

}  // namespace birkhoff
