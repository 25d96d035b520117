#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "data/loader/token_pairs.h"
#include "models/translation_model.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// Predicts the target of each pair of documents from its source.
class TranslationTask final : public Task {
 public:
  explicit TranslationTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    corpus.stream(split, task().source());  // fail if there is none
    corpus.stream(split, task().target());
    const auto& source = corpus.tokenizer_entry(task().source());
    const auto& target = corpus.tokenizer_entry(task().target());
    if (config_.model().encoder().share_embedding() &&
        source.SerializeAsString() != target.SerializeAsString()) {
      fail(ExitCode::kConfig,
           "model.encoder.share_embedding: needs one tokenizer, but the streams '{}' and '{}' of "
           "{} have one each, with {} and {} ids; prepare them with one, or set it to false",
           task().source(), task().target(), corpus.folder().string(), source.vocabulary(),
           target.vocabulary());
    }
    return {.vocabulary = target.vocabulary(),
            .source_vocabulary = source.vocabulary(),
            .class_names = {}};
  }
  ModelInputs inputs(std::int64_t vocabulary) const override {
    return {.vocabulary = vocabulary, .source_vocabulary = vocabulary, .class_names = {}};
  }
  std::string target_stream() const override { return task().target(); }
  std::string source_stream() const override { return task().source(); }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    return std::make_unique<TranslationModel>(config_, inputs.source_vocabulary, inputs.vocabulary,
                                              task().label_smoothing(), place);
  }

  std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const override {
    return token_pairs(corpus, options(kTrainSplit));
  }
  void check_source(const Corpus& corpus) const override {
    check_token_pairs(corpus, options(kTrainSplit));
  }
  std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                  const std::string& split) const override {
    return token_pairs(corpus, options(split));
  }
  bool targets_are_text() const override { return true; }
  std::unique_ptr<Targets> evaluation_targets(const Corpus& corpus, const std::string& split,
                                              std::int64_t num_samples) const override {
    return std::make_unique<TextTargets>(count_pair_targets(corpus, options(split), num_samples));
  }

  Batch synthetic_batch(std::int64_t vocabulary, at::Device device) const override {
    const at::TensorOptions integers = at::TensorOptions(at::kLong).device(device);
    const std::int64_t rows = config_.train().global_batch();
    const std::int64_t sources = config_.data().sequence_length(), targets = target_length(config_);
    const at::Generator generator = at::detail::createCPUGenerator(config_.train().seed());
    const at::Tensor tokens = at::randint(vocabulary, {rows, targets + 1}, generator, integers);
    Batch batch;
    batch.fields.emplace(field::kInputs,
                         at::randint(vocabulary, {rows, sources}, generator, integers));
    batch.fields.emplace(field::kLengths, at::full({rows}, sources, integers));
    batch.fields.emplace(field::kPrevious, tokens.narrow(1, 0, targets));
    batch.fields.emplace(field::kTargets, tokens.narrow(1, 1, targets));
    batch.fields.emplace(field::kMask, at::ones({rows, targets}, integers.dtype(at::kByte)));
    batch.sample_ids_B = at::arange(rows, integers);
    return batch;
  }

  std::string cut_texts(const Corpus& corpus, const std::string& split) const override {
    const std::int64_t num_cut = count_cut_pairs(corpus, options(split));
    if (num_cut == 0) return "";
    return fmt::format(
        "{} of {} of split {} are cut to their first tokens: sources to data.sequence_length = {}, "
        "targets to task.translation.target_length = {}",
        num_cut, counted(corpus.stream(split, task().target()).documents(), "pair"), split,
        config_.data().sequence_length(), target_length(config_));
  }

 private:
  const configs::Translation& task() const { return config_.task().translation(); }

  // How much the widths of batches are rounded up. A rank's batches depend on the number of ranks.
  // So if results must not, or if noise depends on the widths, all batches have the same; recorded
  // steps need that anyway. On a GPU, multiples of 8 are fast, and fewer shapes need less memory.
  std::int64_t width_multiple() const {
    const configs::Train& train = config_.train();
    if (has_attention_noise(config_.model()) || train.invariant().shards() > 0 ||
        train.cuda_graph()) {
      return std::max(config_.data().sequence_length(), target_length(config_));
    }
    return config_.device() == configs::Config::cuda ? 8 : 1;
  }

  PairOptions options(const std::string& split) const {
    return {.split = split,
            .source = task().source(),
            .target = task().target(),
            .source_length = config_.data().sequence_length(),
            .target_length = target_length(config_),
            .width_multiple = width_multiple()};
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_translation_task(const configs::Config& config) {
  return std::make_unique<TranslationTask>(config);
}

}  // namespace birkhoff
