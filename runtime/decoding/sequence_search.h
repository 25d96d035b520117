// Continues many sequences at a time with a decoder: beam search, greedy search (a beam of one) and
// sampling.
//
// Beam search keeps, of each source, the `beam` likeliest unfinished sequences. A step extends each
// by every id and ranks the extensions by their log-probability. Of the first `beam` extensions,
// those that end with the end mark are finished; the first `beam` extensions without it continue.
// A source is done when `beam` sequences are finished, or when it has max_tokens ids: sequences of
// that length are finished as they are. The result is the finished sequence with the highest
//
//   score = sum of log-probabilities / penalty(n),   penalty(n) = ((c + n) / (c + 1))^alpha
//
// for n ids, with the end mark. c = 5 is the penalty of GNMT (Wu et al. 2016, section 7) and T2T;
// c = 0, fairseq's n^alpha. The rules for finished sequences are fairseq's (Ott et al. 2019); they
// make a beam of one the greedy search, whatever the penalty.
//
// Ties go to the extension of the sequence that ranked higher in the step before, then to the
// smaller id; of finished sequences with equal scores to the one that was finished first. What is
// found for a source depends on other sources of the batch only as far as the model's logits do: on
// matrices of other sizes, sums may be taken in another order.
//
// Legend: B sources, V vocabulary.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "models/decoder.h"
#include "runtime/decoding/sampling.h"

namespace birkhoff {

struct SearchOptions {
  std::int64_t beam = 1;
  double length_penalty = 0;  // alpha; 0: the sum of log-probabilities decides
  double length_offset = 5;   // c
  std::optional<std::int32_t> end_mark =
      std::nullopt;  // not set: no sequence ends before max_tokens
  // Draws each id instead of searching; the beam is then 1.
  std::optional<Sampling> sampling = std::nullopt;
};

// Invalid options: Error(kUsage), which names the option.
void check_search(const SearchOptions& options);

struct FoundSequence {
  std::vector<std::int32_t> ids;  // generated ones, with the end mark if one was reached
  double log_probability = 0;     // sum, in nats
  double score = 0;
};

// A source to continue: its place in the cache is its position in the vector.
struct SearchStart {
  std::int32_t last = 0;        // the last id of its prompt, which the cache does not hold yet
  std::int64_t max_tokens = 0;  // ids to generate at most, at least 1
  std::uint64_t text = 0;       // its number, which keys the noise of sampling
};

// The best sequence of each source, in their order. The cache holds the prompts of the sources
// without their last ids, which have equal lengths, or the encoded sources. Error(kInternal) if a
// source asks for more ids than the cache has space for. Error(kNumerical) if log-probabilities are
// not finite numbers.
std::vector<FoundSequence> find_sequences(StepDecoder& model, std::unique_ptr<DecodeCache> cache,
                                          const std::vector<SearchStart>& starts,
                                          const SearchOptions& options);

}  // namespace birkhoff
