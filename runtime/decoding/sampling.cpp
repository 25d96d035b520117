#include "runtime/decoding/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// The `count` likeliest ids, the likeliest first; equals by id.
std::vector<std::int32_t> likeliest(std::span<const double> logits_V, std::int64_t count) {
  std::vector<std::int32_t> ids(logits_V.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto logit = [&](std::int32_t id) { return logits_V[static_cast<std::size_t>(id)]; };
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](auto a, auto b) {
    return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
  });
  ids.resize(static_cast<std::size_t>(count));
  return ids;
}

}  // namespace

void check_sampling(const Sampling& sampling) {
  if (!(sampling.temperature >= 0 && std::isfinite(sampling.temperature))) {
    fail(ExitCode::kUsage, "temperature: {} is not a finite number of at least 0",
         sampling.temperature);
  }
  if (sampling.top_k < 0) {
    fail(ExitCode::kUsage, "top-k: {} is negative; 0 means all ids", sampling.top_k);
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    fail(ExitCode::kUsage, "top-p: {} is not above 0 and at most 1; 1 means all ids",
         sampling.top_p);
  }
}

// Draws from softmax(logits / temperature) over the ids that top_k and then top_p leave, by
// inverting its cumulative sum at u in (0, 1].
std::int32_t sample(std::span<const double> logits_V, const Sampling& sampling, std::uint64_t text,
                    std::int64_t n) {
  const std::int64_t vocabulary = std::ssize(logits_V);
  const std::int64_t count =
      sampling.top_k == 0 ? vocabulary : std::min(sampling.top_k, vocabulary);
  const std::vector<std::int32_t> ids = likeliest(logits_V, sampling.temperature == 0 ? 1 : count);
  if (sampling.temperature == 0) return ids.front();
  const auto logit = [&](std::int32_t id) { return logits_V[static_cast<std::size_t>(id)]; };
  std::vector<double> cumulative;
  double sum = 0;
  for (const std::int32_t id : ids) {
    sum += std::exp((logit(id) - logit(ids.front())) / sampling.temperature);
    cumulative.push_back(sum);
  }
  const std::uint64_t key =
      noise_key(sampling.seed, static_cast<std::uint64_t>(n), /*layer=*/0, NoisePurpose::kSampling);
  const double u = uniform_from_bits(philox(key, text, 0)[0]);
  const auto last = std::lower_bound(cumulative.begin(), cumulative.end(), sampling.top_p * sum);
  const auto chosen = std::lower_bound(cumulative.begin(), last, u * *last);
  return ids[static_cast<std::size_t>(chosen - cumulative.begin())];
}

}  // namespace birkhoff
