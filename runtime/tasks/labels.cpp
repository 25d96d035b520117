#include "runtime/tasks/labels.h"

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {

std::vector<std::string> classes_of(const Corpus& corpus, const std::string& split,
                                    const std::string& label) {
  const auto& names = corpus.record(split, label).class_name();
  return {names.begin(), names.end()};
}

std::vector<std::string> numbered_classes(int classes) {
  std::vector<std::string> names;
  for (int i = 0; i < classes; ++i) names.push_back(std::to_string(i));
  return names;
}

void check_classes(const std::string& task, int classes, const std::string& label,
                   const std::vector<std::string>& names) {
  const auto count = static_cast<std::int64_t>(names.size());
  if (count == classes) return;
  if (count < 2) {
    fail(ExitCode::kData, "the corpus' record '{}' holds no labels; set {}.label to one that does",
         label, task);
  }
  fail(ExitCode::kConfig,
       "{}.classes: is {}, but the corpus has {} for its label '{}'; set it to {}", task, classes,
       counted(count, "class", "classes"), label, count);
}

}  // namespace birkhoff
