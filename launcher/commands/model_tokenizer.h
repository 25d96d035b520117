// The tokenizer of a model or corpus, for preparing other text in the same way.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/tokenizers/known_tokenizer.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/tasks/task.h"

namespace birkhoff {

// Error(kUsage) if the model reads no text.
TokenizerSource tokenizer_source(const CheckpointFolder& checkpoint);

// The tokenizer of a corpus folder, a run folder (its newest checkpoint) or a checkpoint.
// Error(kUsage) for anything else.
TokenizerSource tokenizer_source(const std::string& run_or_corpus);

// The tokenizer of sources of such a corpus or model, if they have one of their own.
std::optional<TokenizerSource> source_tokenizer_source(const std::string& run_or_corpus);

// The names of the classes 0, 1, ... of such a corpus or model; empty if it has none.
std::vector<std::string> class_names(const std::string& run_or_corpus);

// Checks that ids mean the same in the corpus and in the model, and that the model has all ids that
// the corpus may hold: the corpus may lack the model's end-of-document id, but not vice versa. Of
// pairs, sources and targets. Error(kData) names the command that makes a matching corpus. path:
// the run's path, as the user gave it.
void require_same_tokenizer(const Task& task, const CheckpointFolder& checkpoint,
                            const std::string& path, const Corpus& corpus);

// Checks that a split's labels have the same meaning as the model's, if it is a classifier, and
// that images have the same shape. Errors as above.
void require_same_inputs(const Task& task, const CheckpointFolder& checkpoint,
                         const std::string& path, const Corpus& corpus, const std::string& split);

}  // namespace birkhoff
