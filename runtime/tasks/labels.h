// Labels as targets of tasks: their classes, and the check that a model is built for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "runtime/tasks/targets.h"

namespace birkhoff {

// Targets without figures of their own: the model reports its accuracy.
class LabelTargets final : public Targets {
 public:
  // unit: what has a label.
  LabelTargets(std::int64_t count, std::string unit) : count_(count), unit_(std::move(unit)) {}

  std::string unit() const override { return unit_; }
  std::int64_t count() const override { return count_; }

 private:
  const std::int64_t count_;
  const std::string unit_;
};

// The classes of a record of labels. Error(kData) if the split lacks it.
std::vector<std::string> classes_of(const Corpus& corpus, const std::string& split,
                                    const std::string& label);
// The names of as many classes as a configuration has, without a corpus.
std::vector<std::string> numbered_classes(int classes);

// Checks that a model is built for as many classes as the labels have. task: the path of its
// configuration. Error(kData) if there are no labels, Error(kConfig) if there are more or fewer.
void check_classes(const std::string& task, int classes, const std::string& label,
                   const std::vector<std::string>& names);

}  // namespace birkhoff
