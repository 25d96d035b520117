// What a task reads: the sample sources that its configuration names. What it predicts, and the
// figures that it reports, are the model's (models/model.h).
#pragma once

#include <memory>
#include <string>

#include "configs/config.pb.h"
#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

// The corpus stream whose text the figures count: bytes and words.
const std::string& text_stream(const configs::Config& config);

// The samples to train on. Error(kData) if the split is missing or too short.
std::unique_ptr<SampleSource> training_source(const configs::Config& config, const Corpus& corpus);

// The samples of a split to evaluate, in order, none twice. Errors as above.
std::unique_ptr<SampleSource> evaluation_source(const configs::Config& config,
                                                const std::string& split, const Corpus& corpus);

// Finds the errors of training_source() without opening any file of the corpus.
void check_source(const configs::Config& config, const Corpus& corpus);

}  // namespace birkhoff
