// The text behind the targets of a model of text: denominators of metrics per byte and per word,
// and the cost of unknown tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/corpus/corpus.h"
#include "data/loader/token_pairs.h"
#include "data/loader/token_windows.h"

namespace birkhoff {

struct TargetCounts {
  std::int64_t tokens = 0;          // the targets themselves
  std::int64_t unknown_tokens = 0;  // targets that are the unknown id
  std::int64_t unknown_bytes = 0;   // of text that these stand for
  // Bytes of text that the targets stand for; characters, words (runs of anything but ASCII white
  // space) and line ends that begin in them. End marks stand for none.
  std::int64_t bytes = 0, characters = 0, words = 0, line_ends = 0;
  // Why metrics per byte, and per word, cannot be computed; empty if they can.
  std::string no_bytes{}, no_words{};

  // Metrics of a model whose loss on all these targets is `nats`. A model says only that a token is
  // unknown; spelling its text costs at most 8 bits for each byte and for its end, which are added.
  // So metrics are comparable between vocabularies. Unset: see no_bytes and no_words, or the text
  // has none.
  std::optional<double> bits_per_byte(double nats) const;
  std::optional<double> bits_per_character(double nats) const;
  std::optional<double> word_perplexity(double nats) const;
  // The same with line ends as words.
  std::optional<double> word_and_line_perplexity(double nats) const;
};

// Counts the targets of the first `num_windows` windows of evaluation_windows(), in one pass over
// their tokens. Error(kData) if the corpus is damaged.
TargetCounts count_targets(const Corpus& corpus, const WindowOptions& options,
                           std::int64_t num_windows);

// Counts the targets of the first `num_pairs` pairs. Errors as above.
TargetCounts count_pair_targets(const Corpus& corpus, const PairOptions& options,
                                std::int64_t num_pairs);

}  // namespace birkhoff
