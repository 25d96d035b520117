#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/config.pb.h"
#include "models/language_model.h"
#include "models/model.h"
#include "models/text_classifier.h"

namespace birkhoff {
namespace {

// A model is built for as many classes as the configuration says, whatever the corpus.
void check_classes(const configs::Classification& task, const ModelInputs& inputs) {
  const auto classes = static_cast<std::int64_t>(inputs.class_names.size());
  if (classes == task.classes()) return;
  if (classes < 2) {
    fail(ExitCode::kData,
         "the corpus' record '{}' holds no labels; set task.classification.label to one that does",
         task.label());
  }
  fail(ExitCode::kConfig,
       "task.classification.classes: is {}, but the corpus has {} for its label '{}'; set it to {}",
       task.classes(), counted(classes, "class", "classes"), task.label(), classes);
}

}  // namespace

std::unique_ptr<Model> make_model(const configs::Config& config, const ModelInputs& inputs,
                                  const ParallelGroups& parallel) {
  const auto not_trainable = [](const char* task) {
    fail(ExitCode::kConfig,
         "task.{0}: {0} is part of the schema but cannot be trained yet; tasks that can: "
         "language_model, classification",
         task);
  };
  using configs::Task;
  switch (config.task().kind_case()) {
    case Task::kLanguageModel:
      return std::make_unique<LanguageModel>(config, inputs.vocabulary, parallel);
    case Task::kTranslation:
      not_trainable("translation");
      break;
    case Task::kClassification:
      check_classes(config.task().classification(), inputs);
      return std::make_unique<TextClassifier>(config, inputs.vocabulary, parallel);
    case Task::kPixelModel:
      not_trainable("pixel_model");
      break;
    case Task::kImageClassification:
      not_trainable("image_classification");
      break;
    case Task::kPointSets:
      not_trainable("point_sets");
      break;
    case Task::KIND_NOT_SET:
      fail(ExitCode::kConfig, "task: no task is set; add: task {{ language_model {{ }} }}");
  }
  require(false, "task has a kind outside its oneof");
  return nullptr;
}

}  // namespace birkhoff
