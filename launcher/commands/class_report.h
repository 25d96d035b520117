// The predictions of a classifier that was evaluated, class by class, as `birkhoff eval` prints
// them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "data/scores/confusion_matrix.h"

namespace birkhoff {

// The share of the most frequent class: "majority class good 55.6 %".
std::string majority_text(const ConfusionMatrix& confusion, const std::vector<std::string>& names);

// A table with a row for each class: samples, F1, and how many are predicted to have each class.
// One line about --json if there are many classes.
std::string class_table(const ConfusionMatrix& confusion, const std::vector<std::string>& names);

// Adds "majority_class", "majority_share", "classes" (an object for each class) and, with at most
// ConfusionMatrix::kMaxPairs classes, "confusion" (a row for each label, with the number of samples
// for each prediction).
void add_classes(const ConfusionMatrix& confusion, const std::vector<std::string>& names,
                 nlohmann::ordered_json& object);

}  // namespace birkhoff
