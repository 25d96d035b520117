// Description and verification of a corpus, for `birkhoff inspect` and `birkhoff verify`.
#pragma once

#include <string>

#include "data/corpus/corpus.h"

namespace birkhoff {

// Several lines: the tokenizer, and for each split its documents, tokens, bytes, words and shards,
// its labels and its other records.
std::string describe_corpus(const Corpus& corpus);

// "2 classes (bad, good)": their number, and as many names as fit in a line.
std::string classes_text(const google::protobuf::RepeatedPtrField<std::string>& names);

// Reads every shard again and checks page CRCs, ids against the vocabulary, labels against the
// number of classes, document ends and file hash. If all of that is right in every shard, checks
// the HDF5 structure in a sandboxed child process. Error(kData) names the first difference: the
// file, and the page if it is in one.
void verify_corpus(const Corpus& corpus);

}  // namespace birkhoff
