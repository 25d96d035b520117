#include "cluster/base/error.h"
#include "configs/config.pb.h"
#include "models/language_model.h"
#include "models/model.h"

namespace birkhoff {

std::unique_ptr<Model> make_model(const configs::Config& config, std::int64_t vocabulary,
                                  const ParallelGroups& parallel) {
  const auto not_trainable = [](const char* task) {
    fail(ExitCode::kConfig,
         "task.{0}: {0} is part of the schema but cannot be trained yet; tasks that can: "
         "language_model",
         task);
  };
  using configs::Task;
  switch (config.task().kind_case()) {
    case Task::kLanguageModel:
      return std::make_unique<LanguageModel>(config, vocabulary, parallel);
    case Task::kTranslation:
      not_trainable("translation");
      break;
    case Task::kClassification:
      not_trainable("classification");
      break;
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
