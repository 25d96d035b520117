#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include "configs/loader/check.h"
#include "data/loader/token_windows.h"
#include "models/embeddings/vocabulary_parts.h"
#include "models/language_model.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// Predicts each token of a stream from those before it.
class LanguageModelTask final : public Task {
 public:
  explicit LanguageModelTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    corpus.stream(split, options(split).stream);  // fails if there is none
    return inputs(corpus.vocabulary());
  }
  ModelInputs inputs(std::int64_t vocabulary) const override {
    return {.vocabulary = vocabulary, .class_names = {}};
  }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    return std::make_unique<LanguageModel>(config_, inputs.vocabulary, place);
  }

  std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const override {
    return training_windows(corpus, options(kTrainSplit));
  }
  void check_source(const Corpus& corpus) const override {
    num_training_windows(corpus, options(kTrainSplit));
  }
  std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                  const std::string& split) const override {
    return evaluation_windows(corpus, evaluation_options(split));
  }
  std::unique_ptr<SampleSource> source_with_documents(const Corpus& corpus,
                                                      const std::string& split) const override {
    WindowOptions windows = evaluation_options(split);
    windows.with_documents = true;
    return evaluation_windows(corpus, windows);
  }
  bool targets_are_text() const override { return true; }
  std::unique_ptr<Targets> evaluation_targets(const Corpus& corpus, const std::string& split,
                                              std::int64_t num_samples) const override {
    return std::make_unique<TextTargets>(
        count_targets(corpus, evaluation_options(split), num_samples));
  }

  // Inputs and targets are views of rows of T + 1 tokens.
  Batch synthetic_batch(std::int64_t vocabulary, at::Device device) const override {
    const at::TensorOptions integers = at::TensorOptions(at::kLong).device(device);
    const std::int64_t rows = config_.train().global_batch();
    const std::int64_t length = config_.data().sequence_length();
    const at::Generator generator = at::detail::createCPUGenerator(config_.train().seed());
    // The cost of adaptive softmax depends on the frequencies of ids.
    const bool adaptive = config_.model().adaptive_softmax().cutoff_size() > 0;
    const at::Tensor tokens =
        adaptive ? zipf_ids(at::rand({rows, length + 1}, generator, integers.dtype(at::kDouble)),
                            vocabulary)
                 : at::randint(vocabulary, {rows, length + 1}, generator, integers);
    Batch batch;
    batch.fields.emplace(field::kInputs, tokens.narrow(1, 0, length));
    batch.fields.emplace(field::kTargets, tokens.narrow(1, 1, length));
    batch.fields.emplace(field::kMask, at::ones({rows, length}, integers.dtype(at::kByte)));
    if (const auto& memory = config_.model().memory(); memory.length() > 0) {
      const at::ScalarType type =
          config_.train().precision() == configs::Train::fp64 ? at::kDouble : at::kFloat;
      batch.fields.emplace(field::kPast, at::zeros({rows, config_.model().layers(), memory.length(),
                                                    config_.model().channels()},
                                                   integers.dtype(type)));
    }
    batch.sample_ids_B = at::arange(rows, integers);
    return batch;
  }

 private:
  WindowOptions options(const std::string& split) const {
    return {.split = split,
            .stream = config_.task().language_model().stream(),
            .sequence_length = config_.data().sequence_length(),
            .restart_at_documents = config_.data().restart_at_documents(),
            .shift_windows = config_.data().shift_windows(),
            .seed = config_.train().seed(),
            .lanes = config_.model().memory().length() > 0 ? config_.train().global_batch() : 0};
  }
  WindowOptions evaluation_options(const std::string& split) const {
    WindowOptions windows = options(split);
    windows.sequence_length = evaluation_sequence_length(config_);
    windows.stride = config_.evaluate().stride();
    return windows;
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_language_model_task(const configs::Config& config) {
  return std::make_unique<LanguageModelTask>(config);
}

}  // namespace birkhoff
