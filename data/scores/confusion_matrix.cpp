#include "data/scores/confusion_matrix.h"

#include <numeric>

#include "cluster/base/error.h"

namespace birkhoff {

ConfusionMatrix::ConfusionMatrix(std::int64_t classes)
    : classes_(classes), counts_(index(classes * (classes <= kMaxPairs ? classes + 3 : 3)), 0) {
  require(classes >= 1, "a classifier has classes");
}

void ConfusionMatrix::add(std::int64_t label, std::int64_t predicted) {
  require(0 <= label && label < classes_ && 0 <= predicted && predicted < classes_,
          "a sample's classes are those of the model");
  ++counts_[index(label)];
  ++counts_[index(classes_ + predicted)];
  if (label == predicted) ++counts_[index(2 * classes_ + label)];
  if (has_pairs()) ++counts_[index((3 + label) * classes_ + predicted)];
}

std::int64_t ConfusionMatrix::pairs(std::int64_t label, std::int64_t predicted) const {
  require(has_pairs(), "pairs of many classes are not counted");
  return counts_[index((3 + label) * classes_ + predicted)];
}

std::optional<double> ConfusionMatrix::f1(std::int64_t k) const {
  const std::int64_t all = labels(k) + predictions(k);
  if (all == 0) return std::nullopt;
  return 2 * static_cast<double>(correct(k)) / static_cast<double>(all);
}

double ConfusionMatrix::macro_f1() const {
  double sum = 0, terms = 0;
  for (std::int64_t k = 0; k < classes_; ++k) {
    const std::optional<double> of_class = f1(k);
    if (!of_class) continue;
    sum += *of_class;
    ++terms;
  }
  return sum / terms;
}

std::int64_t ConfusionMatrix::majority() const {
  std::int64_t most = 0;
  for (std::int64_t k = 1; k < classes_; ++k) {
    if (labels(k) > labels(most)) most = k;
  }
  return most;
}

double ConfusionMatrix::majority_share() const {
  const std::int64_t samples =
      std::accumulate(counts_.begin(), counts_.begin() + classes_, std::int64_t{0});
  return static_cast<double>(labels(majority())) / static_cast<double>(samples);
}

}  // namespace birkhoff
