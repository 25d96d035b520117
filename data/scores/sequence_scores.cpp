#include "data/scores/sequence_scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "cluster/base/error.h"

namespace birkhoff {

std::int64_t edit_distance(const Ids& a, const Ids& b) {
  // distances[j]: between the ids of a so far and the first j of b (Wagner and Fischer 1974).
  std::vector<std::int64_t> distances(b.size() + 1);
  std::iota(distances.begin(), distances.end(), 0);
  for (const std::int32_t id : a) {
    std::int64_t diagonal = distances[0]++;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::int64_t substituted = diagonal + (id != b[j - 1]);
      diagonal = distances[j];
      distances[j] = std::min({substituted, distances[j] + 1, distances[j - 1] + 1});
    }
  }
  return distances.back();
}

void SequenceScores::add(const Ids& prediction, const Ids& reference) {
  ++cases;
  exact += prediction == reference;
  edits += edit_distance(prediction, reference);
  reference_ids += std::ssize(reference);
}

SequenceScores& SequenceScores::operator+=(const SequenceScores& other) {
  cases += other.cases;
  exact += other.exact;
  edits += other.edits;
  reference_ids += other.reference_ids;
  return *this;
}

double SequenceScores::exact_match() const {
  return static_cast<double>(exact) / static_cast<double>(cases);
}

double SequenceScores::edit_rate() const {
  return static_cast<double>(edits) / static_cast<double>(reference_ids);
}

void ScoresByLength::add(const Ids& prediction, const Ids& reference) {
  require(!reference.empty(), "ScoresByLength: a reference without an end mark");
  const auto symbols = std::max<std::uint64_t>(reference.size() - 1, 1);
  const int bucket = std::bit_width(symbols - 1);  // the least power of two that is not below
  require(bucket < kBuckets, "ScoresByLength: the reference is too long");
  buckets_[static_cast<std::size_t>(bucket)].add(prediction, reference);
}

SequenceScores ScoresByLength::total() const {
  SequenceScores sum;
  for (const SequenceScores& scores : buckets_) sum += scores;
  return sum;
}

std::string ScoresByLength::table() const {
  const auto row = [](const std::string& lengths, const SequenceScores& scores) {
    return fmt::format("{:>11} {:>9} {:>12.2f} {:>14.4f}\n", lengths, scores.cases,
                       100 * scores.exact_match(), scores.edit_rate());
  };
  std::string text = fmt::format("{:>11} {:>9} {:>12} {:>14}\n", "length", "cases", "exact match",
                                 "edit distance");
  for (std::size_t k = 0; k < kBuckets; ++k) {
    const std::int64_t most = std::int64_t{1} << k, least = most / 2 + 1;
    if (buckets_[k].cases == 0) continue;
    text += row(least >= most ? fmt::format("{}", most) : fmt::format("{}-{}", least, most),
                buckets_[k]);
  }
  return text + row("all", total());
}

}  // namespace birkhoff
