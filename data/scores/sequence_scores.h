// Scores of predicted sequences of ids against the right ones: exact match and edit distance, as in
// T2T's algorithmic tasks (Vaswani et al. 2018, "Tensor2Tensor for Neural Machine Translation") and
// in table 1 of Sparse Sinkhorn Attention (Tay et al. 2020):
//
//   exact match = right cases / cases,   edit distance = sum of edits / sum of reference lengths
//
// where edits are insertions, deletions and substitutions of an id (Levenshtein). The end mark is
// part of a sequence, and counts.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

using Ids = std::vector<std::int32_t>;

// The minimum number of edits that make one sequence the other. Time: the product of the lengths.
std::int64_t edit_distance(const Ids& a, const Ids& b);

struct SequenceScores {
  std::int64_t cases = 0, exact = 0, edits = 0, reference_ids = 0;

  void add(const Ids& prediction, const Ids& reference);
  SequenceScores& operator+=(const SequenceScores& other);
  double exact_match() const;  // a share; NaN without cases
  double edit_rate() const;    // edits per id of the references; NaN without any
};

// Scores by the length of the reference, without its end mark: a bucket for each power of two, from
// 1 to 2^30. A bucket holds the lengths above half its limit.
class ScoresByLength {
 public:
  static constexpr int kBuckets = 31;

  // The reference ends with an end mark.
  void add(const Ids& prediction, const Ids& reference);
  const std::array<SequenceScores, kBuckets>& buckets() const { return buckets_; }
  SequenceScores total() const;
  // A line per bucket that has cases, and one for all: lengths, cases, exact match in percent, edit
  // distance.
  std::string table() const;

 private:
  std::array<SequenceScores, kBuckets> buckets_{};
};

}  // namespace birkhoff
