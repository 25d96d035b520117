// Bytes, characters, words and sentences of text that comes in parts, for per-byte, per-character
// and per-word figures.
#pragma once

#include <cstdint>
#include <string_view>

#include "configs/corpus_manifest.pb.h"

namespace birkhoff {

// Characters: bytes that begin one in UTF-8. Words: runs of anything but ASCII white space.
// Sentences: lines that hold a word. Borders of documents end both.
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
