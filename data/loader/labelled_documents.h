// The documents of a stream with the label of each: the samples of classifiers. Sample i is
// document i of the split.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

struct DocumentOptions {
  std::string split = "train";
  std::string stream = "tokens";
  std::string label = "label";
  std::int64_t sequence_length = 0;  // T: longer documents are cut to their first T tokens
};

// Batches have inputs, lengths and labels (data/batch/batch.h). Error(kData) if the split lacks
// them or has no document.
std::unique_ptr<SampleSource> labelled_documents(const Corpus& corpus,
                                                 const DocumentOptions& options);

// The number of documents that are longer than sequence_length. Reads all document ends.
std::int64_t count_cut_documents(const Corpus& corpus, const DocumentOptions& options);

// Finds the errors of labelled_documents() without opening any file of the corpus.
void check_labelled_documents(const Corpus& corpus, const DocumentOptions& options);

}  // namespace birkhoff
