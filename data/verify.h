// What `birkhoff inspect` says of a corpus. (verify_corpus is declared in data/corpus.h.)
#pragma once

#include <string>

#include "data/corpus.h"

namespace birkhoff {

// Several lines: tokenizer, and for each split its documents, tokens, bytes, words and shards.
std::string describe_corpus(const Corpus& corpus);

}  // namespace birkhoff
