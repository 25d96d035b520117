// Documents with the same text in two splits: what training sees should not be what evaluation
// measures.
//
// Memory is bounded: the texts are known by their 64-bit hashes, of which at most kMaxTexts are
// kept. If there are more, only texts whose hash is a multiple of 2, then 4, .. are kept and
// counted, and the counts are estimates: all copies of a text have one hash, so a share of the
// texts has the same share of the copies (adaptive sampling, Flajolet 1990, "On adaptive
// sampling").
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/prepare/input/documents.h"

namespace birkhoff {

class SplitOverlap {
 public:
  static constexpr std::size_t kMaxTexts = 1 << 18;

  // The next part of the text of a document in a split.
  void add(std::string_view text);
  // The document ends. A cut document is one in each split.
  void end_document(SplitIndex split, const Document& document);

  // A warning for each two splits that share texts.
  std::vector<std::string> notes() const;

 private:
  using Copies = std::array<std::uint32_t, 3>;  // of a text, by split

  std::uint64_t hash_ = 0;     // of the current document
  std::uint64_t sampled_ = 1;  // texts are kept whose hash is a multiple of it
  std::unordered_map<std::uint64_t, Copies> texts_;
  std::array<std::int64_t, 3> documents_ = {};  // by split
  std::array<std::string, 3> first_;            // by pair: the first document whose text was shared
};

}  // namespace birkhoff
