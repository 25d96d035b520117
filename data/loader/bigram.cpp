#include "data/loader/bigram.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cluster/base/error.h"
#include "data/loader/target_counts.h"
#include "data/loader/token_windows.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMaxIds = 8192;  // 8192^2 counts of 4 bytes are 256 MiB

// Calls visit(previous, next) for every pair of adjacent tokens of a split.
template <typename Visit>
void for_each_pair(const Corpus& corpus, const std::string& split, Visit visit) {
  constexpr std::int64_t kLength = 4096;
  const auto windows = evaluation_windows(corpus, {.split = split, .sequence_length = kLength});
  for (std::int64_t window = 0; window < windows->num_samples(); ++window) {
    const Batch batch = read_samples(*windows, window, window + 1);
    const auto* inputs = batch.at(field::kInputs).const_data_ptr<std::int64_t>();
    const auto* targets = batch.at(field::kTargets).const_data_ptr<std::int64_t>();
    const auto* mask = batch.at(field::kMask).const_data_ptr<std::uint8_t>();
    for (std::int64_t t = 0; t < kLength; ++t) {
      if (mask[t] != 0) visit(inputs[t], targets[t]);
    }
  }
}

}  // namespace

BigramFigures bigram_figures(const Corpus& corpus, const std::string& split) {
  const std::int64_t v = corpus.vocabulary();
  if (v > kMaxIds)
    fail(ExitCode::kUsage,
         "--bigram: a vocabulary of {} ids is too large for a table of pairs (at most {})", v,
         kMaxIds);
  std::vector<std::uint32_t> pairs(static_cast<std::size_t>(v * v));
  std::vector<double> firsts(static_cast<std::size_t>(v)), seconds(static_cast<std::size_t>(v));
  double tokens = 0;
  for_each_pair(corpus, "train", [&](std::int64_t a, std::int64_t b) {
    ++pairs[static_cast<std::size_t>(a * v + b)];
    ++firsts[static_cast<std::size_t>(a)];
    ++seconds[static_cast<std::size_t>(b)];
    ++tokens;
  });
  BigramFigures figures;
  double nats = 0;
  for_each_pair(corpus, split, [&](std::int64_t a, std::int64_t b) {
    const double unigram =
        (seconds[static_cast<std::size_t>(b)] + 1) / (tokens + static_cast<double>(v));
    nats -= std::log((pairs[static_cast<std::size_t>(a * v + b)] + unigram) /
                     (firsts[static_cast<std::size_t>(a)] + 1));
    ++figures.tokens;
  });
  figures.loss = nats / static_cast<double>(std::max<std::int64_t>(1, figures.tokens));
  const WindowOptions all{.split = split, .sequence_length = figures.tokens};
  figures.targets = count_targets(corpus, all, /*num_windows=*/1);
  return figures;
}

}  // namespace birkhoff
