// The rule that assigns the bytes of documents to splits. See docs/corpus_format.md, "Documents and
// splits".
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "data/prepare/input/documents.h"

namespace birkhoff {

// Bytes [begin, end) of a document that go to a split.
struct DocumentPiece {
  SplitIndex split = kTrain;
  std::int64_t begin = 0, end = 0;
};

// The position of a document among those that are drawn; it depends only on the name.
std::uint64_t document_key(std::string_view name);

// Documents whose InputPath::split is kValid or kTest go to that split whole. From each kTrain
// input, the fractions of its bytes are held out. A document that is small relative to its input
// goes whole to a split: its key draws the split with the fractions as probabilities. If that split
// would exceed its share by more than the limit for small documents, the document goes to the split
// that is owed most. A larger document is cut at the fractions into train, valid and test, each
// time at the first character that begins there. The share of a split differs from the requested
// one by at most 1/128 of the input, and its share of all larger documents by at most 3 bytes. A
// row of a table is drawn however large it is, because half a text need not have the label of the
// whole, and so is an image, which counts as one byte.
class SplitRule {
 public:
  SplitRule(const InputScan& scan, double valid_fraction, double test_fraction);

  // The pieces of the next document, in the order of the walk. Call reset() when a pass begins. At
  // most one piece per split; no piece is empty.
  std::vector<DocumentPiece> pieces(const Document& document);
  void reset();

  // Whether the split gets text: it has a fraction, or its own texts.
  bool has(SplitIndex split) const;

 private:
  // The bytes seen so far, and those given to each split.
  struct Ledger {
    std::int64_t seen = 0;
    std::array<std::int64_t, 3> given = {};
  };
  // The number of the first `seen` bytes that are due to the splits up to and including `last`;
  // train comes first.
  std::int64_t due(SplitIndex last, std::int64_t seen) const;
  double small_bytes(const Document& document) const;  // the limit in its input
  SplitIndex draw(const Document& document);
  std::vector<DocumentPiece> cut(const Document& document);

  const std::vector<std::int64_t> input_bytes_;
  const std::array<double, 3> fractions_;
  const std::array<double, 3> ends_;  // where a split ends, as a fraction of a text
  std::array<bool, 3> has_ = {};
  double small_ = 0;    // documents up to this fraction of their input are not cut
  Ledger cut_, drawn_;  // of all cut documents; of the drawn documents of one input
  std::int64_t drawn_input_ = -1;
};

}  // namespace birkhoff
