// The tokenizer of a model or corpus, for text that is to be like its own.
#pragma once

#include <string>

#include "data/corpus/corpus.h"
#include "data/tokenizers/known_tokenizer.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

TokenizerSource tokenizer_source(const CheckpointFolder& checkpoint);

// Of a corpus folder, a run folder (its newest checkpoint) or a checkpoint. Anything else:
// Error(kUsage).
TokenizerSource tokenizer_source(const std::string& run_or_corpus);

// Ids must mean the same in the corpus and in the model, and the model must have all that the
// corpus may hold: it may lack the model's end of a document, not the other way round. Error(kData)
// names the command that makes a corpus that fits; path: the run's, as the user gave it.
void require_same_tokenizer(const CheckpointFolder& checkpoint, const std::string& path,
                            const Corpus& corpus);

}  // namespace birkhoff
