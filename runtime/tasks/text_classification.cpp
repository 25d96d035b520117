#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "data/loader/labelled_documents.h"
#include "models/embeddings/token_embedding.h"
#include "models/sequence_classifier.h"
#include "runtime/tasks/labels.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

Pooling text_pooling(configs::Classification::Pooling pooling) {
  switch (pooling) {
    case configs::Classification::mean:
      return Pooling::kMean;
    case configs::Classification::first:
      return Pooling::kFirst;
    case configs::Classification::max:
      return Pooling::kMax;
  }
  require(false, "task.classification.pooling has a value outside its enum");
  return {};
}

// Predicts the label of each document, or of each pair of documents.
class TextClassificationTask final : public Task {
 public:
  explicit TextClassificationTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    corpus.stream(split, task().stream());  // fails if there is none
    if (classifies_pairs()) corpus.stream(split, task().second_stream());
    return {.vocabulary = corpus.vocabulary(),
            .class_names = classes_of(corpus, split, task().label())};
  }
  ModelInputs inputs(std::int64_t vocabulary) const override {
    return {.vocabulary = vocabulary, .class_names = numbered_classes(task().classes())};
  }
  bool classifies_pairs() const override { return !task().second_stream().empty(); }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    check_classes("task.classification", task().classes(), task().label(), inputs.class_names);
    return std::make_unique<SequenceClassifier>(
        config_,
        [&](Parameters& parameters) {
          return std::make_unique<TokenEmbedding>(config_, StackRole::kEncoder, inputs.vocabulary,
                                                  parameters);
        },
        text_pooling(task().pooling()), task().classes(), place, has_two_towers() ? 2 : 1);
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
    return std::make_unique<LabelTargets>(num_samples, "sequence", task().classes());
  }

  Batch synthetic_batch(std::int64_t vocabulary, at::Device device) const override {
    const at::TensorOptions integers = at::TensorOptions(at::kLong).device(device);
    const std::int64_t rows = config_.train().global_batch();
    const std::int64_t length = config_.data().sequence_length();
    const at::Generator generator = at::detail::createCPUGenerator(config_.train().seed());
    Batch batch;
    // Drawn like a language model's.
    if (has_two_towers()) {
      batch.fields.emplace(field::kInputs,
                           at::randint(vocabulary, {rows, 2, length}, generator, integers));
      batch.fields.emplace(field::kLengths, at::full({rows, 2}, length, integers));
    } else {
      batch.fields.emplace(
          field::kInputs,
          at::randint(vocabulary, {rows, length + 1}, generator, integers).narrow(1, 0, length));
      batch.fields.emplace(field::kLengths, at::full({rows}, length, integers));
    }
    batch.fields.emplace(field::kLabels,
                         at::randint(task().classes(), {rows}, generator, integers));
    batch.sample_ids_B = at::arange(rows, integers);
    return batch;
  }

  std::string cut_texts(const Corpus& corpus, const std::string& split) const override {
    const std::int64_t num_cut = count_cut_documents(corpus, options(split));
    if (num_cut == 0) return "";
    const bool pairs = classifies_pairs();
    return fmt::format(
        "{} of {} of split {} are cut to {}data.sequence_length = {} tokens", num_cut,
        counted(corpus.stream(split, task().stream()).documents(), pairs ? "pair" : "text"), split,
        pairs ? "" : "their first ", config_.data().sequence_length());
  }

 private:
  const configs::Classification& task() const { return config_.task().classification(); }
  bool has_two_towers() const { return birkhoff::has_two_towers(config_.task()); }

  DocumentOptions options(const std::string& split) const {
    return {.split = split,
            .stream = task().stream(),
            .label = task().label(),
            .sequence_length = config_.data().sequence_length(),
            .second_stream = task().second_stream(),
            .joined = classifies_pairs() && !has_two_towers(),
            .trim = config_.train().batch_tokens() > 0};
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_text_classification_task(const configs::Config& config) {
  return std::make_unique<TextClassificationTask>(config);
}

}  // namespace birkhoff
