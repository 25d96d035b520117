#include "runtime/tasks/task.h"

#include <fmt/format.h>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/loader/labelled_documents.h"
#include "data/loader/token_windows.h"

namespace birkhoff {
namespace {

WindowOptions window_options(const configs::Config& config, const std::string& split) {
  return {.split = split,
          .stream = token_stream(config),
          .sequence_length = config.data().sequence_length(),
          .restart_at_documents = config.data().restart_at_documents(),
          .shift_windows = config.data().shift_windows(),
          .seed = config.train().seed()};
}

DocumentOptions document_options(const configs::Config& config, const std::string& split) {
  return {.split = split,
          .stream = token_stream(config),
          .label = config.task().classification().label(),
          .sequence_length = config.data().sequence_length()};
}

}  // namespace

const std::string& token_stream(const configs::Config& config) {
  if (config.task().has_classification()) return config.task().classification().stream();
  require(config.task().has_language_model(), "make_model() accepted the task");
  return config.task().language_model().stream();
}

bool predicts_text(const configs::Config& config) { return config.task().has_language_model(); }

ModelInputs model_inputs(const configs::Config& config, const Corpus& corpus) {
  ModelInputs inputs{.vocabulary = corpus.vocabulary(), .class_names = {}};
  if (config.task().has_classification()) {
    const auto& record = corpus.record(kTrainSplit, config.task().classification().label());
    inputs.class_names.assign(record.class_name().begin(), record.class_name().end());
  }
  return inputs;
}

ModelInputs model_inputs(const configs::CheckpointManifest& manifest) {
  return {.vocabulary = manifest.vocabulary(),
          .class_names = {manifest.class_name().begin(), manifest.class_name().end()}};
}

std::unique_ptr<SampleSource> training_source(const configs::Config& config, const Corpus& corpus) {
  if (config.task().has_classification())
    return labelled_documents(corpus, document_options(config, kTrainSplit));
  return training_windows(corpus, window_options(config, kTrainSplit));
}

std::unique_ptr<SampleSource> evaluation_source(const configs::Config& config,
                                                const std::string& split, const Corpus& corpus) {
  if (config.task().has_classification())
    return labelled_documents(corpus, document_options(config, split));
  return evaluation_windows(corpus, window_options(config, split));
}

TargetCounts evaluation_targets(const configs::Config& config, const std::string& split,
                                const Corpus& corpus, std::int64_t num_samples) {
  return count_targets(corpus, window_options(config, split), num_samples);
}

std::string cut_texts(const configs::Config& config, const std::string& split,
                      const Corpus& corpus) {
  if (!config.task().has_classification()) return "";
  const std::int64_t num_cut = count_cut_documents(corpus, document_options(config, split));
  if (num_cut == 0) return "";
  return fmt::format("{} of {} of split {} are cut to their first data.sequence_length = {} tokens",
                     num_cut,
                     counted(corpus.stream(split, token_stream(config)).documents(), "text"), split,
                     config.data().sequence_length());
}

void check_source(const configs::Config& config, const Corpus& corpus) {
  if (config.task().has_classification())
    return check_labelled_documents(corpus, document_options(config, kTrainSplit));
  num_training_windows(corpus, window_options(config, kTrainSplit));
}

}  // namespace birkhoff
