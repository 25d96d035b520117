// The simplest model worth beating: a smoothed bigram model of the tokens of a corpus.
#pragma once

#include <cstdint>
#include <string>

#include "data/corpus/corpus.h"
#include "data/loader/target_counts.h"

namespace birkhoff {

struct BigramFigures {
  double loss = 0;  // nats per token of the held-out split
  std::int64_t tokens = 0;
  TargetCounts targets;  // the text of these tokens
};

// Counts pairs over the train split and scores `split` with p(b | a) = (count(a, b) + p(b)) /
// (count(a) + 1), where p(b) = (count(b) + 1) / (tokens + V). Reads both splits once. Memory: V^2
// counts. V above 8192: Error(kUsage).
BigramFigures bigram_figures(const Corpus& corpus, const std::string& split);

}  // namespace birkhoff
