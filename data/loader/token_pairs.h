// The pairs of two streams of a split: the samples of models that predict a target from its source.
// Sample i is document i of both streams.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

struct PairOptions {
  std::string split = "train";
  std::string source = "source", target = "target";  // streams
  // Tokens, end marks included. Of longer documents only the first tokens are used.
  std::int64_t source_length = 0, target_length = 0;
  // Batches are as wide as their longest source and target, rounded up to a multiple of this. With
  // a multiple that is at least as large as the lengths, all batches have the same shapes.
  std::int64_t width_multiple = 1;
};

// Batches have the fields of models of pairs (data/batch/batch.h). Their widths are at most
// source_length and target_length. Error(kData) if the
// split lacks a stream or has no document, or if the target's tokenizer has no end mark.
std::unique_ptr<SampleSource> token_pairs(const Corpus& corpus, const PairOptions& options);

// Finds the errors of token_pairs() without opening any file of the corpus.
void check_token_pairs(const Corpus& corpus, const PairOptions& options);

// The number of pairs whose source or target is longer than its length. Reads all document ends.
std::int64_t count_cut_pairs(const Corpus& corpus, const PairOptions& options);

}  // namespace birkhoff
