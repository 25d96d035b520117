// The list of tasks. Nothing else lists them.
#include "runtime/tasks/task.h"

#include <algorithm>
#include <string>

#include "cluster/base/error.h"
#include "models/attention_paths.h"

namespace birkhoff {
namespace {

struct Entry {
  configs::Task::KindCase kind;
  std::unique_ptr<Task> (*make)(const configs::Config&);
};

constexpr Entry kTasks[] = {
    {configs::Task::kLanguageModel, make_language_model_task},
    {configs::Task::kTranslation, make_translation_task},
    {configs::Task::kClassification, make_text_classification_task},
    {configs::Task::kPixelModel, make_pixel_model_task},
    {configs::Task::kImageClassification, make_image_classification_task},
    {configs::Task::kPointSets, make_point_sets_task},
};

const std::string& name_of(configs::Task::KindCase kind) {
  return configs::Task::descriptor()->FindFieldByNumber(kind)->name();
}

}  // namespace

std::unique_ptr<Task> make_task(const configs::Config& config) {
  const auto kind = config.task().kind_case();
  if (kind == configs::Task::KIND_NOT_SET) {
    fail(ExitCode::kConfig, "task: no task is set; add: task {{ {} {{ }} }}",
         name_of(kTasks[0].kind));
  }
  const auto* entry = std::ranges::find(kTasks, kind, &Entry::kind);
  require(entry != std::end(kTasks), "each task of the schema is in the table");
  return entry->make(config);
}

std::unique_ptr<Model> make_model(const configs::Config& config, std::int64_t vocabulary,
                                  const ModelPlacement& place) {
  const std::unique_ptr<Task> task = make_task(config);
  return task->make_model(task->inputs(vocabulary), place);
}

std::vector<std::string> slow_attention_paths(const configs::Config& config,
                                              const ModelInputs& inputs, const Batch& batch) {
  return slow_attention_paths(
      config,
      [&inputs](const configs::Config& part, at::Device device) {
        return make_task(part)->make_model(inputs, device);
      },
      batch);
}

std::int64_t vocabulary_of(const configs::Config& config, const Corpus& corpus) {
  const std::unique_ptr<Task> task = make_task(config);
  return task->own_vocabulary().value_or(
      corpus.tokenizer_entry(task->target_stream()).vocabulary());
}

ModelInputs model_inputs(const configs::CheckpointManifest& manifest) {
  ModelInputs inputs{.vocabulary = manifest.vocabulary(),
                     .source_vocabulary = manifest.has_source_tokenizer()
                                              ? manifest.source_tokenizer().vocabulary()
                                              : manifest.vocabulary(),
                     .class_names = {manifest.class_name().begin(), manifest.class_name().end()}};
  if (manifest.image_shape_size() == 3) {
    inputs.image = {manifest.image_shape(0), manifest.image_shape(1), manifest.image_shape(2)};
  }
  return inputs;
}

}  // namespace birkhoff
