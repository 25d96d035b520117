// The list of tasks. Nothing else lists them.
#include "runtime/tasks/task.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

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
    {configs::Task::kClassification, make_text_classification_task},
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
  if (entry != std::end(kTasks)) return entry->make(config);
  std::vector<std::string> names;
  for (const Entry& task : kTasks) names.push_back(name_of(task.kind));
  fail(ExitCode::kConfig,
       "task.{0}: {0} is part of the schema but cannot be trained yet; tasks that can: {1}",
       name_of(kind), fmt::join(names, ", "));
}

std::unique_ptr<Model> make_model(const configs::Config& config, std::int64_t vocabulary,
                                  const ModelPlacement& place) {
  const std::unique_ptr<Task> task = make_task(config);
  return task->make_model(task->inputs(vocabulary), place);
}

std::vector<std::string> slow_attention_paths(const configs::Config& config,
                                              std::int64_t vocabulary, const Batch& batch) {
  return slow_attention_paths(
      config,
      [vocabulary](const configs::Config& part, at::Device device) {
        return make_model(part, vocabulary, device);
      },
      batch);
}

ModelInputs model_inputs(const configs::CheckpointManifest& manifest) {
  return {.vocabulary = manifest.vocabulary(),
          .class_names = {manifest.class_name().begin(), manifest.class_name().end()}};
}

}  // namespace birkhoff
