#include "data/prepare/input/split_rule.h"

#include <algorithm>
#include <cmath>

#include "cluster/base/files/checksum.h"

namespace birkhoff {
namespace {

// Moves the position to the beginning of a character, if one begins within three bytes.
std::int64_t character_begin(DocumentReader& reader, std::int64_t position) {
  const std::int64_t size = reader.document().bytes;
  if (position == 0 || position >= size) return position;
  for (int steps = 0; steps < 3 && position < size; ++steps, ++position) {
    char byte = 0;
    reader.read(&byte, 1, position);
    if ((static_cast<unsigned char>(byte) & 0xc0) != 0x80) break;
  }
  return position;
}

}  // namespace

std::uint64_t document_key(std::string_view name) { return xxh3_high(name.data(), name.size()); }

SplitRule::SplitRule(const InputScan& scan, double valid_fraction, double test_fraction)
    : input_bytes_(scan.input_bytes),
      fractions_{1 - valid_fraction - test_fraction, valid_fraction, test_fraction},
      ends_{1 - valid_fraction - test_fraction, 1 - test_fraction, 1} {
  double smallest = 1;
  for (const double fraction : fractions_) {
    if (fraction > 0) smallest = std::min(smallest, fraction);
  }
  // No split gets more than one small document too much, so none is owed more than two. That is at
  // most 1/128 of the input, and less than any split's share, so that no split stays empty.
  small_ = std::min(1.0 / 256, smallest / 4);
  has_ = {true, valid_fraction > 0 || scan.documents_of[kValid] > 0,
          test_fraction > 0 || scan.documents_of[kTest] > 0};
}

void SplitRule::reset() {
  cut_ = drawn_ = {};
  drawn_input_ = -1;
}

bool SplitRule::has(SplitIndex split) const { return has_[split]; }

// One multiplication without an addition, which some machines would fuse: the result is the same
// everywhere.
std::int64_t SplitRule::due(SplitIndex last, std::int64_t seen) const {
  return static_cast<std::int64_t>(std::floor(ends_[last] * static_cast<double>(seen)));
}

std::vector<DocumentPiece> SplitRule::pieces(const Document& document) {
  if (document.split != kTrain) return {{document.split, 0, document.bytes}};
  const bool is_small = static_cast<double>(document.bytes) <= small_bytes(document);
  if (is_small || document.is_whole) return {{draw(document), 0, document.bytes}};
  return cut(document);
}

double SplitRule::small_bytes(const Document& document) const {
  return small_ * static_cast<double>(input_bytes_.at(static_cast<std::size_t>(document.input)));
}

SplitIndex SplitRule::draw(const Document& document) {
  if (document.input != drawn_input_) {
    drawn_ = {};
    drawn_input_ = document.input;
  }
  drawn_.seen += document.bytes;
  std::array<std::int64_t, 3> owed = {};
  std::int64_t before = 0;
  for (const SplitIndex split : kSplits) {
    const std::int64_t end = due(split, drawn_.seen);
    owed[split] = end - before - drawn_.given[split];
    before = end;
  }
  const double place = std::ldexp(static_cast<double>(document_key(document.name) >> 11), -53);
  auto drawn = static_cast<SplitIndex>(
      std::find_if(ends_.begin(), ends_.end(), [=](double end) { return place < end; }) -
      ends_.begin());
  if (static_cast<double>(document.bytes - owed[drawn]) > small_bytes(document)) {
    drawn = static_cast<SplitIndex>(std::max_element(owed.begin(), owed.end()) - owed.begin());
  }
  drawn_.given[drawn] += document.bytes;
  return drawn;
}

std::vector<DocumentPiece> SplitRule::cut(const Document& document) {
  cut_.seen += document.bytes;
  std::vector<DocumentPiece> pieces;
  DocumentReader reader(document);
  std::int64_t begin = 0, given_before = 0;
  for (const SplitIndex split : kSplits) {
    given_before += cut_.given[split];
    if (fractions_[split] == 0) continue;
    const std::int64_t end = character_begin(
        reader, std::clamp(due(split, cut_.seen) - given_before, begin, document.bytes));
    if (begin < end) pieces.push_back({split, begin, end});
    cut_.given[split] += end - begin;
    begin = end;
  }
  return pieces;
}

}  // namespace birkhoff
