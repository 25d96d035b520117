// Draws one id from a model's logits.
//
// Legend: V vocabulary.
#pragma once

#include <cstdint>
#include <span>

namespace birkhoff {

struct Sampling {
  // Logits are divided by it. 0: always the likeliest id (the smallest of equals).
  double temperature = 1.0;
  std::int64_t top_k = 0;  // sample only among the k likeliest ids; 0: among all
  // Of those, sample only among the fewest likeliest ids whose probabilities, at this temperature,
  // add up to top_p or more (Holtzman et al. 2020); in (0, 1], 1: among all.
  double top_p = 1.0;
  // Keys the noise: id n of a text depends only on (seed, text, n) and the logits.
  std::uint64_t seed = 1;
};

// Invalid options: Error(kUsage), which names the option.
void check_sampling(const Sampling& sampling);

// Id n of a text, from its logits [V].
std::int32_t sample(std::span<const double> logits_V, const Sampling& sampling, std::uint64_t text,
                    std::int64_t n);

}  // namespace birkhoff
