// What a task reads: the sample sources that its configuration names, and what the corpus says
// about them. What it predicts, and the figures that it reports, are the model's (models/model.h).
#pragma once

#include <memory>
#include <string>

#include "configs/checkpoint_manifest.pb.h"
#include "configs/config.pb.h"
#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"
#include "data/loader/target_counts.h"
#include "models/model.h"

namespace birkhoff {

inline constexpr char kTrainSplit[] = "train";

// The corpus stream that the task reads.
const std::string& token_stream(const configs::Config& config);
// Whether the targets are the tokens of that stream, so that figures count its bytes and words.
bool predicts_text(const configs::Config& config);

// What the model of the task reads and predicts: from the corpus to train on, or from a checkpoint.
// Error(kData) if the corpus lacks it.
ModelInputs model_inputs(const configs::Config& config, const Corpus& corpus);
ModelInputs model_inputs(const configs::CheckpointManifest& manifest);

// The samples to train on. Error(kData) if the split is missing or too short.
std::unique_ptr<SampleSource> training_source(const configs::Config& config, const Corpus& corpus);

// The samples of a split to evaluate, in order, none twice. Errors as above.
std::unique_ptr<SampleSource> evaluation_source(const configs::Config& config,
                                                const std::string& split, const Corpus& corpus);

// What the targets of the first `num_samples` of these samples stand for; the task must predict
// text.
TargetCounts evaluation_targets(const configs::Config& config, const std::string& split,
                                const Corpus& corpus, std::int64_t num_samples);

// That the task cuts some texts of the split to data.sequence_length, and how many; empty: none.
std::string cut_texts(const configs::Config& config, const std::string& split,
                      const Corpus& corpus);

// Finds the errors of training_source() without opening any file of the corpus.
void check_source(const configs::Config& config, const Corpus& corpus);

}  // namespace birkhoff
