// A Task defines what a run trains on and predicts: the fields of the corpus that the model reads,
// the samples, the model and the targets. A run makes its Task once, from its configuration.
// Nothing outside this folder asks which task it is.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "configs/schema/checkpoint_manifest.pb.h"
#include "configs/schema/config.pb.h"
#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"
#include "models/model.h"
#include "runtime/tasks/targets.h"

namespace birkhoff {

inline constexpr char kTrainSplit[] = "train";

class Task {
 public:
  virtual ~Task() = default;

  // What a model reads and predicts, for a split of the corpus. Error(kData) if the split lacks a
  // field that the task reads.
  virtual ModelInputs inputs(const Corpus& corpus, const std::string& split) const = 0;
  // The same for a vocabulary of that size, without a corpus. Images have a shape that fits the
  // configuration.
  virtual ModelInputs inputs(std::int64_t vocabulary) const = 0;
  // The vocabulary of models that read no text; not set: that of the corpus' tokenizer.
  virtual std::optional<std::int64_t> own_vocabulary() const { return std::nullopt; }
  // Whether the model reads the tokens of a text, and so needs a tokenizer.
  bool reads_text() const { return !own_vocabulary(); }
  // The streams of the targets and sources of pairs, whose tokenizers may differ
  // (Corpus::tokenizer_entry); empty: the task has no pairs, and its tokens are of the corpus'
  // tokenizer.
  virtual std::string target_stream() const { return ""; }
  virtual std::string source_stream() const { return ""; }

  // Whether a sample is a pair of texts with one label.
  virtual bool classifies_pairs() const { return false; }

  // Builds this rank's part of the model. Error(kConfig) if a value is invalid, or does not fit
  // `inputs`: the number of classes, the size of images. Error(kData) if there are no labels.
  virtual std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                            const ModelPlacement& place) const = 0;

  // The samples to train on. Error(kData) if the split is missing or too short.
  virtual std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const = 0;
  // Finds the errors of training_source() without opening any file of the corpus.
  virtual void check_source(const Corpus& corpus) const = 0;
  // The samples of a split to evaluate, in order, none twice. Errors as training_source().
  virtual std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                          const std::string& split) const = 0;

  // evaluation_source() with field::kDocuments; null: the targets are not tokens of documents.
  virtual std::unique_ptr<SampleSource> source_with_documents(const Corpus&,
                                                              const std::string& /*split*/) const {
    return nullptr;
  }

  // A batch of train.global_batch samples, laid out like a batch of the loader, on the CPU or the
  // meta device. Its tokens and targets depend only on train.seed. No sequence is padded.
  virtual Batch synthetic_batch(std::int64_t vocabulary, at::Device device) const = 0;

  // Whether targets are the tokens of a text, so that figures count its bytes and words.
  virtual bool targets_are_text() const { return false; }
  // The targets of the first samples of evaluation_source(). Error(kData) if the corpus is damaged.
  virtual std::unique_ptr<Targets> evaluation_targets(const Corpus& corpus,
                                                      const std::string& split,
                                                      std::int64_t num_samples) const = 0;
  // A message that says how many samples of the split are cut to the model's lengths; empty: none.
  virtual std::string cut_texts(const Corpus&, const std::string& /*split*/) const { return ""; }
};

// The tasks of table.cpp, each in a file of its own.
std::unique_ptr<Task> make_language_model_task(const configs::Config& config);
std::unique_ptr<Task> make_text_classification_task(const configs::Config& config);
std::unique_ptr<Task> make_translation_task(const configs::Config& config);
std::unique_ptr<Task> make_pixel_model_task(const configs::Config& config);
std::unique_ptr<Task> make_image_classification_task(const configs::Config& config);
std::unique_ptr<Task> make_point_sets_task(const configs::Config& config);

// The task of a resolved configuration. Error(kConfig) if none is set.
std::unique_ptr<Task> make_task(const configs::Config& config);
// The model of a resolved configuration with a vocabulary of that size and no corpus. Errors as
// make_task() and Task::make_model().
std::unique_ptr<Model> make_model(const configs::Config& config, std::int64_t vocabulary,
                                  const ModelPlacement& place);

// slow_attention_paths() of the model for `inputs` (models/attention_paths.h).
std::vector<std::string> slow_attention_paths(const configs::Config& config,
                                              const ModelInputs& inputs, const Batch& batch);

// The vocabulary of a configuration's model for a corpus.
std::int64_t vocabulary_of(const configs::Config& config, const Corpus& corpus);

// What the model of a checkpoint reads and predicts.
ModelInputs model_inputs(const configs::CheckpointManifest& manifest);

}  // namespace birkhoff
