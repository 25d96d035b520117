// Which bytes of which document go to which split. docs/corpus_format.md, "Documents and splits".
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "data/prepare/documents.h"

namespace birkhoff {

// Bytes [begin, end) of a document that go to a split.
struct Piece {
  SplitIndex split = kTrain;
  std::int64_t begin = 0, end = 0;
};

// Place of a document among those that are drawn, from its name alone.
std::uint64_t document_key(std::string_view name);

// Documents of InputPath::split kValid and kTest go there whole. Of each input of kTrain the
// fractions of its bytes are held out. A document that is small in its input goes whole to the
// split that its key draws with the fractions as odds, unless that has had more than its share by
// as much as a document may be small; then to the split that is owed most. A larger one is cut at
// the fractions, at the first character that begins there: train, valid, test. The share of a split
// is within 1/128 of the input of what was asked, and that of all larger documents within 3 bytes.
class SplitRule {
 public:
  SplitRule(const InputScan& scan, double valid_fraction, double test_fraction);

  // Of the next document, in the order of the walk, which begins again with each pass: reset().
  // At most one piece a split, none of them empty.
  std::vector<Piece> pieces(const Document& document);
  void reset();

  // Whether text goes to the split: a fraction is asked for, or it has texts of its own.
  bool has(SplitIndex split) const;

 private:
  // Bytes seen so far and those that each split got.
  struct Ledger {
    std::int64_t seen = 0;
    std::array<std::int64_t, 3> given = {};
  };
  // Bytes of the first `seen` that belong before the end of a split, train being first.
  std::int64_t due(SplitIndex last, std::int64_t seen) const;
  double small_bytes(const Document& document) const;  // of its input
  SplitIndex draw(const Document& document);
  std::vector<Piece> cut(const Document& document);

  const std::vector<std::int64_t> input_bytes_;
  const std::array<double, 3> fractions_;
  const std::array<double, 3> ends_;  // where a split ends, as a fraction of a text
  std::array<bool, 3> has_ = {};
  double small_ = 0;    // of an input: documents up to this fraction of it are not cut
  Ledger cut_, drawn_;  // of all cut documents; of the drawn ones of an input
  std::int64_t drawn_input_ = -1;
};

}  // namespace birkhoff
