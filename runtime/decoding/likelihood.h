// The likelihood of given tokens under a model (teacher forcing).
//
// Legend: B batch, S tokens of a source, T tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "models/token_scorer.h"

namespace birkhoff {

struct Likelihood {
  double log_probability = 0;   // sum over the counted tokens, in nats
  std::int64_t num_tokens = 0;  // that count
  // Whether each of them is the likeliest token (the smallest id of equals): greedy decoding of the
  // tokens before them would give exactly these.
  bool is_greedy = true;
};

// Tokens of which the last `num_counted` are scored, at least one; the others are their context.
// The first token is never scored.
struct ScoredTokens {
  std::vector<std::int32_t> ids;
  std::int64_t num_counted = 0;
  std::vector<std::int32_t> source = {};  // for a translation model; else empty
};

// The likelihoods of texts, in their order. Sums are in fp64. At most max_tokens() + 1 ids each,
// and either all with a source or none. restart_after: for a model trained with
// data.restart_at_documents, the end mark after which a document begins. Error(kNumerical) if a
// log-probability is not a finite number.
std::vector<Likelihood> likelihoods(TokenScorer& model, const std::vector<ScoredTokens>& texts,
                                    std::optional<std::int32_t> restart_after = std::nullopt);

// For each text and each of its counted tokens, the likeliest token (the smallest id of equals)
// after the true tokens before it. Texts and errors as above.
std::vector<std::vector<std::int32_t>> likeliest_tokens(TokenScorer& model,
                                                        const std::vector<ScoredTokens>& texts);

}  // namespace birkhoff
