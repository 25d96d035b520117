// Tasks whose targets are labels: the classes, and a check of their number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "runtime/tasks/targets.h"

namespace birkhoff {

// Targets that add no figures of the loss: accuracy and the confusion matrix come from predictions.
class LabelTargets final : public Targets {
 public:
  // unit: the name of what has a label, such as "image".
  LabelTargets(std::int64_t count, std::string unit, std::int64_t classes)
      : count_(count), unit_(std::move(unit)), classes_(classes) {}

  std::string unit() const override { return unit_; }
  std::int64_t count() const override { return count_; }
  std::int64_t classes() const override { return classes_; }

 private:
  const std::int64_t count_;
  const std::string unit_;
  const std::int64_t classes_;
};

// The names of the classes of a record of labels. Error(kData) if the split lacks the record.
std::vector<std::string> classes_of(const Corpus& corpus, const std::string& split,
                                    const std::string& label);
// Names for the classes if there is no corpus: "0", "1", ...
std::vector<std::string> numbered_classes(int classes);

// Checks that the configuration has as many classes as the corpus. task: the path of the task in
// the configuration. label: the record. names: its classes. Error(kData) if the record holds no
// labels, Error(kConfig) if the numbers differ.
void check_classes(const std::string& task, int classes, const std::string& label,
                   const std::vector<std::string>& names);

}  // namespace birkhoff
