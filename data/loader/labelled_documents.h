// The documents of a stream, or the pairs of two streams, with the label of each: the samples of
// classifiers. Sample i is document i of the split.
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
  // The stream of the second texts of pairs; empty: a sample is one text.
  std::string second_stream = {};
  // Both texts of a pair are one sequence: the first one, its end mark, the second one and its end
  // mark, cut as joined_lengths() says. Otherwise they are two sequences.
  bool joined = false;
  // Rows of a batch are as long as its longest document, and not T.
  bool trim = false;
};

// The tokens of two texts that are left in a sequence of at most `length` (2 or more) tokens: the
// longer text is cut, token by token from its end, the second one if both are equally long
// ("longest first"). Each keeps at least one token, its end mark.
struct PairLengths {
  std::int64_t first = 0, second = 0;
};
PairLengths joined_lengths(PairLengths tokens, std::int64_t length);

// Batches have inputs, lengths and labels (data/batch/batch.h). Error(kData) if the split lacks
// them or has no document, or if the two streams of pairs have different tokenizers.
std::unique_ptr<SampleSource> labelled_documents(const Corpus& corpus,
                                                 const DocumentOptions& options);

// The number of samples that are cut. Reads all document ends.
std::int64_t count_cut_documents(const Corpus& corpus, const DocumentOptions& options);

// Finds the errors of labelled_documents() without opening any file of the corpus.
void check_labelled_documents(const Corpus& corpus, const DocumentOptions& options);

}  // namespace birkhoff
