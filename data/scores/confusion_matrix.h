// The confusion matrix of a classifier: how many samples of each class are predicted to have each
// class. The scores that follow from it, as scikit-learn computes them:
//
//   F1 of class k = 2 correct_k / (labels_k + predictions_k)
//   macro F1      = its mean over the classes that have samples or predictions
//
// where labels_k samples have class k, predictions_k are predicted to have it, and correct_k both.
// So a class without samples that is predicted somewhere has an F1 of 0, and one that is never
// predicted either has none.
//
// Legend: K classes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace birkhoff {

class ConfusionMatrix {
 public:
  // The number of classes up to which all pairs of classes are counted.
  static constexpr std::int64_t kMaxPairs = 1000;

  explicit ConfusionMatrix(std::int64_t classes);

  // Counts a sample. Both classes are in [0, K).
  void add(std::int64_t label, std::int64_t predicted);
  // All counts, for sums over ranks.
  std::vector<std::int64_t>& counts() { return counts_; }

  std::int64_t classes() const { return classes_; }
  std::int64_t labels(std::int64_t k) const { return counts_[index(k)]; }
  std::int64_t predictions(std::int64_t k) const { return counts_[index(classes_ + k)]; }
  std::int64_t correct(std::int64_t k) const { return counts_[index(2 * classes_ + k)]; }
  // With at most kMaxPairs classes: the number of samples of class `label` with this prediction.
  bool has_pairs() const { return classes_ <= kMaxPairs; }
  std::int64_t pairs(std::int64_t label, std::int64_t predicted) const;

  std::optional<double> f1(std::int64_t k) const;
  double macro_f1() const;  // NaN without samples
  // The class with most samples (the first of equals), and its share: the accuracy of a model that
  // always predicts it. NaN without samples.
  std::int64_t majority() const;
  double majority_share() const;

 private:
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  std::int64_t classes_;
  std::vector<std::int64_t> counts_;  // labels, predictions and correct [K], then pairs [K, K]
};

}  // namespace birkhoff
