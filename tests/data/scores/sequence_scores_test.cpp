// Exact match and edit distance against a brute-force search, and the cases that T2T's definition
// decides.
#include "data/scores/sequence_scores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

namespace birkhoff {
namespace {

// The definition: the least number of single edits from a to b, by a breadth-first search over all
// sequences of ids below `alphabet`.
std::int64_t searched_distance(const Ids& a, const Ids& b, std::int32_t alphabet) {
  const std::size_t longest = std::max(a.size(), b.size());
  std::set<Ids> seen = {a}, front = {a};
  for (std::int64_t edits = 0;; ++edits) {
    if (front.count(b) > 0) return edits;
    std::set<Ids> next;
    const auto reach = [&](const Ids& ids) {
      if (ids.size() <= longest && seen.insert(ids).second) next.insert(ids);
    };
    for (const Ids& ids : front) {
      for (std::size_t i = 0; i <= ids.size(); ++i) {
        const auto at = static_cast<std::ptrdiff_t>(i);
        for (std::int32_t id = 0; id < alphabet; ++id) {
          Ids inserted = ids;
          inserted.insert(inserted.begin() + at, id);
          reach(inserted);
          if (i == ids.size()) continue;
          Ids substituted = ids;
          substituted[i] = id;
          reach(substituted);
        }
        if (i == ids.size()) continue;
        Ids removed = ids;
        removed.erase(removed.begin() + at);
        reach(removed);
      }
    }
    front = std::move(next);
  }
}

Ids random_ids(std::mt19937& random, std::size_t max_length, std::uint32_t alphabet) {
  Ids ids(random() % (max_length + 1));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % alphabet);
  return ids;
}

TEST(EditDistance, IsWhatASearchOverAllEditsFinds) {
  std::mt19937 random(1);
  for (int n = 0; n < 300; ++n) {
    const Ids a = random_ids(random, 5, 3), b = random_ids(random, 5, 3);
    EXPECT_EQ(edit_distance(a, b), searched_distance(a, b, 3));
    EXPECT_EQ(edit_distance(b, a), edit_distance(a, b));
  }
}

TEST(SequenceScores, CountTheEndMarkAndWeighByLength) {
  constexpr std::int32_t kEnd = 1;
  SequenceScores scores;
  scores.add({5, 6, kEnd}, {5, 6, kEnd});
  scores.add({5, 6}, {5, 6, kEnd});  // no end mark: one edit, and no match
  scores.add({7, kEnd}, {4, 5, 6, 7, kEnd});
  EXPECT_EQ(scores.exact, 1);
  EXPECT_DOUBLE_EQ(scores.exact_match(), 1.0 / 3);
  EXPECT_DOUBLE_EQ(scores.edit_rate(), (0 + 1 + 3) / 11.0);  // not the mean of 0, 1/3 and 3/5
  EXPECT_TRUE(std::isnan(SequenceScores().exact_match()));
}

TEST(ScoresByLength, AreTheScoresOfTheirCases) {
  constexpr std::int32_t kEnd = 1;
  ScoresByLength scores;
  const auto sequence = [&](int symbols) {
    Ids ids(static_cast<std::size_t>(symbols), 7);
    ids.push_back(kEnd);
    return ids;
  };
  for (const int symbols : {1, 2, 3, 4, 5, 8, 9, 32, 33, 64}) {
    scores.add(symbols == 64 ? Ids{kEnd} : sequence(symbols), sequence(symbols));
  }
  std::vector<std::int64_t> cases;
  for (const SequenceScores& bucket : scores.buckets()) cases.push_back(bucket.cases);
  cases.resize(8);
  EXPECT_EQ(cases, (std::vector<std::int64_t>{1, 1, 2, 2, 1, 1, 2, 0}));
  EXPECT_EQ(scores.total().cases, 10);
  EXPECT_EQ(scores.total().edits, 64);
  EXPECT_EQ(scores.table(),
            "     length     cases  exact match  edit distance\n"
            "          1         1       100.00         0.0000\n"
            "          2         1       100.00         0.0000\n"
            "        3-4         2       100.00         0.0000\n"
            "        5-8         2       100.00         0.0000\n"
            "       9-16         1       100.00         0.0000\n"
            "      17-32         1       100.00         0.0000\n"
            "      33-64         2        50.00         0.6465\n"
            "        all        10        90.00         0.3743\n");
}

}  // namespace
}  // namespace birkhoff
