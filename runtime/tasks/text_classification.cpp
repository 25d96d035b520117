#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/loader/labelled_documents.h"
#include "models/text_classifier.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

class LabelTargets final : public Targets {
 public:
  explicit LabelTargets(std::int64_t count) : count_(count) {}
  std::string unit() const override { return "sequence"; }
  std::int64_t count() const override { return count_; }

 private:
  const std::int64_t count_;
};

// Predicts the label of each document.
class TextClassificationTask final : public Task {
 public:
  explicit TextClassificationTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    corpus.stream(split, task().stream());  // fails if there is none
    const auto& names = corpus.record(split, task().label()).class_name();
    return {.vocabulary = corpus.vocabulary(), .class_names = {names.begin(), names.end()}};
  }
  ModelInputs inputs(std::int64_t vocabulary) const override {
    ModelInputs inputs{.vocabulary = vocabulary, .class_names = {}};
    for (int i = 0; i < task().classes(); ++i) inputs.class_names.push_back(std::to_string(i));
    return inputs;
  }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    check_classes(static_cast<std::int64_t>(inputs.class_names.size()));
    return std::make_unique<TextClassifier>(config_, inputs.vocabulary, place);
  }

  std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const override {
    return labelled_documents(corpus, options(kTrainSplit));
  }
  void check_source(const Corpus& corpus) const override {
    check_labelled_documents(corpus, options(kTrainSplit));
  }
  std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                  const std::string& split) const override {
    return labelled_documents(corpus, options(split));
  }
  std::unique_ptr<Targets> evaluation_targets(const Corpus&, const std::string&,
                                              std::int64_t num_samples) const override {
    return std::make_unique<LabelTargets>(num_samples);
  }

  Batch synthetic_batch(std::int64_t vocabulary, at::Device device) const override {
    const at::TensorOptions integers = at::TensorOptions(at::kLong).device(device);
    const std::int64_t rows = config_.train().global_batch();
    const std::int64_t length = config_.data().sequence_length();
    const at::Generator generator = at::detail::createCPUGenerator(config_.train().seed());
    Batch batch;
    // Drawn like a language model's.
    batch.fields.emplace(
        field::kInputs,
        at::randint(vocabulary, {rows, length + 1}, generator, integers).narrow(1, 0, length));
    batch.fields.emplace(field::kLengths, at::full({rows}, length, integers));
    batch.fields.emplace(field::kLabels,
                         at::randint(task().classes(), {rows}, generator, integers));
    batch.sample_ids_B = at::arange(rows, integers);
    return batch;
  }

  std::string cut_texts(const Corpus& corpus, const std::string& split) const override {
    const std::int64_t num_cut = count_cut_documents(corpus, options(split));
    if (num_cut == 0) return "";
    return fmt::format(
        "{} of {} of split {} are cut to their first data.sequence_length = {} tokens", num_cut,
        counted(corpus.stream(split, task().stream()).documents(), "text"), split,
        config_.data().sequence_length());
  }

 private:
  const configs::Classification& task() const { return config_.task().classification(); }

  DocumentOptions options(const std::string& split) const {
    return {.split = split,
            .stream = task().stream(),
            .label = task().label(),
            .sequence_length = config_.data().sequence_length()};
  }

  // A model is built for as many classes as the configuration says, whatever the corpus.
  void check_classes(std::int64_t classes) const {
    if (classes == task().classes()) return;
    if (classes < 2) {
      fail(ExitCode::kData,
           "the corpus' record '{}' holds no labels; set task.classification.label to one that "
           "does",
           task().label());
    }
    fail(ExitCode::kConfig,
         "task.classification.classes: is {}, but the corpus has {} for its label '{}'; set it to "
         "{}",
         task().classes(), counted(classes, "class", "classes"), task().label(), classes);
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_text_classification_task(const configs::Config& config) {
  return std::make_unique<TextClassificationTask>(config);
}

}  // namespace birkhoff
