// What `birkhoff inspect` says of a corpus.
#pragma once

#include <string>

#include "data/corpus/corpus.h"

namespace birkhoff {

// Several lines: tokenizer, and for each split its documents, tokens, bytes, words and shards.
std::string describe_corpus(const Corpus& corpus);

// Re-reads every shard: page CRCs, ids below the vocabulary, document ends, file hash; and once all
// that is right everywhere, HDF5 structure in a limited child process. Error(kData) names the first
// difference: file and page, where it lies in one.
void verify_corpus(const Corpus& corpus);

}  // namespace birkhoff
