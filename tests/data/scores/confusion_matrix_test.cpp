#include "data/scores/confusion_matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace birkhoff {
namespace {

struct Predictions {
  std::vector<std::int64_t> labels, predictions;
};

ConfusionMatrix matrix_of(std::int64_t classes, const Predictions& c) {
  ConfusionMatrix matrix(classes);
  for (std::size_t i = 0; i < c.labels.size(); ++i) matrix.add(c.labels[i], c.predictions[i]);
  return matrix;
}

// scikit-learn 1.9: f1_score(labels, predictions, average=None and "macro").
TEST(ConfusionMatrix, ScoresAreThoseOfScikitLearn) {
  // Class 2 is never predicted, class 3 has no sample, class 4 has neither.
  const Predictions c{{0, 0, 0, 1, 1, 2, 2, 0, 1, 1}, {0, 1, 0, 1, 1, 1, 0, 3, 1, 0}};
  const ConfusionMatrix matrix = matrix_of(5, c);
  EXPECT_NEAR(matrix.f1(0).value(), 0.5, 1e-15);
  EXPECT_NEAR(matrix.f1(1).value(), 2.0 / 3, 1e-15);
  EXPECT_EQ(matrix.f1(2).value(), 0);
  EXPECT_EQ(matrix.f1(3).value(), 0);
  EXPECT_FALSE(matrix.f1(4).has_value());
  EXPECT_NEAR(matrix.macro_f1(), 0.2916666666666667, 1e-15);
  EXPECT_EQ(matrix.majority(), 0) << "the first of two classes with four samples";
  EXPECT_EQ(matrix.majority_share(), 0.4);
}

// Against precision and recall, counted sample by sample.
TEST(ConfusionMatrix, F1IsTheHarmonicMeanOfPrecisionAndRecall) {
  constexpr std::int64_t kClasses = 7;
  Predictions c;
  for (std::int64_t i = 0; i < 500; ++i) {
    c.labels.push_back(i * i % kClasses);
    c.predictions.push_back(i % 3 == 0 ? i % kClasses : i * i % kClasses);
  }
  const ConfusionMatrix matrix = matrix_of(kClasses, c);
  std::int64_t counted = 0;
  for (std::int64_t k = 0; k < kClasses; ++k) {
    double labels = 0, predictions = 0, both = 0;
    for (std::size_t i = 0; i < c.labels.size(); ++i) {
      labels += c.labels[i] == k;
      predictions += c.predictions[i] == k;
      both += c.labels[i] == k && c.predictions[i] == k;
    }
    EXPECT_EQ(matrix.labels(k), labels);
    EXPECT_EQ(matrix.predictions(k), predictions);
    EXPECT_EQ(matrix.correct(k), both);
    EXPECT_EQ(matrix.pairs(k, k), both);
    for (std::int64_t j = 0; j < kClasses; ++j) counted += matrix.pairs(k, j);
    if (both == 0) continue;
    const double precision = both / predictions, recall = both / labels;
    EXPECT_NEAR(matrix.f1(k).value(), 2 * precision * recall / (precision + recall), 1e-14) << k;
  }
  EXPECT_EQ(counted, 500);
}

TEST(ConfusionMatrix, ManyClassesHaveScoresWithoutPairs) {
  ConfusionMatrix matrix(65536);
  matrix.add(65535, 65535);
  matrix.add(65535, 7);
  EXPECT_FALSE(matrix.has_pairs());
  EXPECT_EQ(matrix.counts().size(), 3U * 65536);
  EXPECT_NEAR(matrix.macro_f1(), (2.0 / 3 + 0) / 2, 1e-15);
  EXPECT_EQ(matrix.majority(), 65535);
  EXPECT_TRUE(ConfusionMatrix(1000).has_pairs());
}

TEST(ConfusionMatrix, WithoutSamplesNothingIsKnown) {
  const ConfusionMatrix matrix(2);
  EXPECT_TRUE(std::isnan(matrix.macro_f1()));
  EXPECT_TRUE(std::isnan(matrix.majority_share()));
}

}  // namespace
}  // namespace birkhoff
