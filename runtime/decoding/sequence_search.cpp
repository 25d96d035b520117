#include "runtime/decoding/sequence_search.h"

#include <ATen/ops/logsumexp.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// A live sequence with one more id. Candidates of a source are offered in the order of their live
// sequences and ids, so the first of equal sums is the one that the rule for ties names.
struct Candidate {
  double log_probability;
  std::size_t live;  // which sequence it extends
  std::int32_t id;
};

// The best candidates so far, the best first.
class BestCandidates {
 public:
  explicit BestCandidates(std::size_t most) : most_(most) { kept_.reserve(most + 1); }

  void offer(const Candidate& candidate) {
    if (kept_.size() == most_ && candidate.log_probability <= kept_.back().log_probability) return;
    const auto after = std::upper_bound(kept_.begin(), kept_.end(), candidate,
                                        [](const Candidate& a, const Candidate& b) {
                                          return a.log_probability > b.log_probability;
                                        });
    kept_.insert(after, candidate);
    if (kept_.size() > most_) kept_.pop_back();
  }
  std::vector<Candidate> take() { return std::move(kept_); }

 private:
  std::size_t most_;
  std::vector<Candidate> kept_;
};

// The search of one source.
class Search {
 public:
  Search(const SearchStart& start, const SearchOptions& options)
      : start_(start), options_(options), live_(1) {
    live_[0].last = start.last;
  }

  // Reads the logits [V] of each live sequence, with their log-sum-exps, and makes the next live
  // sequences. Returns which of the former each of them extends; nothing if the search is done.
  std::vector<std::size_t> advance(const std::vector<std::span<const double>>& logits,
                                   const std::vector<double>& log_sums) {
    const auto beam = static_cast<std::size_t>(options_.beam);
    std::vector<Live> next;
    std::vector<std::size_t> extended;
    const std::vector<Candidate> candidates = best_candidates(logits, log_sums);
    ++num_tokens_;
    const bool is_last = num_tokens_ == start_.max_tokens;
    for (std::size_t rank = 0; rank < candidates.size() && next.size() < beam; ++rank) {
      const Candidate& candidate = candidates[rank];
      const bool ends = candidate.id == options_.end_mark;
      if (ends && rank >= beam) continue;
      std::vector<std::int32_t> ids = live_[candidate.live].ids;
      ids.push_back(candidate.id);
      if (ends || (is_last && rank < beam)) {
        finish(std::move(ids), candidate.log_probability);
      } else {
        next.push_back({std::move(ids), candidate.log_probability, candidate.id});
        extended.push_back(candidate.live);
      }
    }
    live_ = std::move(next);
    if (is_last || num_finished_ >= options_.beam) return {};
    return extended;
  }

  std::int32_t last(std::size_t live) const { return live_[live].last; }
  std::size_t num_live() const { return live_.size(); }
  FoundSequence take() { return std::move(*best_); }

 private:
  struct Live {
    std::vector<std::int32_t> ids;
    double log_probability = 0;
    std::int32_t last = 0;
  };

  std::vector<Candidate> best_candidates(const std::vector<std::span<const double>>& logits,
                                         const std::vector<double>& log_sums) const {
    if (options_.sampling) {
      const std::int32_t id = sample(logits[0], *options_.sampling, start_.text, num_tokens_);
      const double logit = logits[0][static_cast<std::size_t>(id)];
      return {{live_[0].log_probability + (logit - log_sums[0]), 0, id}};
    }
    // As many may end, and as many then continue.
    BestCandidates best(static_cast<std::size_t>(2 * options_.beam));
    for (std::size_t live = 0; live < live_.size(); ++live) {
      const double before = live_[live].log_probability;
      for (std::size_t id = 0; id < logits[live].size(); ++id) {
        if (std::isinf(logits[live][id])) continue;  // the model excludes the id
        best.offer(
            {before + (logits[live][id] - log_sums[live]), live, static_cast<std::int32_t>(id)});
      }
    }
    return best.take();
  }

  void finish(std::vector<std::int32_t> ids, double log_probability) {
    ++num_finished_;
    const double penalty = std::pow(
        (options_.length_offset + static_cast<double>(ids.size())) / (options_.length_offset + 1),
        options_.length_penalty);
    const double score = log_probability / penalty;
    if (!best_ || score > best_->score) best_ = {std::move(ids), log_probability, score};
  }

  SearchStart start_;
  const SearchOptions& options_;
  std::vector<Live> live_;
  std::optional<FoundSequence> best_;
  std::int64_t num_tokens_ = 0, num_finished_ = 0;
};

}  // namespace

void check_search(const SearchOptions& options) {
  if (options.beam < 1) fail(ExitCode::kUsage, "beam: {} is below 1", options.beam);
  if (!(options.length_penalty >= 0 && std::isfinite(options.length_penalty))) {
    fail(ExitCode::kUsage, "length penalty: {} is not a finite number of at least 0",
         options.length_penalty);
  }
  if (!(options.length_offset >= 0 && std::isfinite(options.length_offset))) {
    fail(ExitCode::kUsage, "length offset: {} is not a finite number of at least 0",
         options.length_offset);
  }
  if (!options.sampling) return;
  check_sampling(*options.sampling);
  if (options.beam > 1) {
    fail(ExitCode::kUsage, "beam: sampling draws one sequence, so a beam of {} has no effect",
         options.beam);
  }
}

std::vector<FoundSequence> find_sequences(StepDecoder& model, std::unique_ptr<DecodeCache> cache,
                                          const std::vector<SearchStart>& starts,
                                          const SearchOptions& options) {
  check_search(options);
  std::vector<Search> searches;
  for (const SearchStart& start : starts) {
    require(start.max_tokens >= 1 && start.max_tokens <= model.max_tokens() - cache->length(),
            "find_sequences: max_tokens");
    searches.emplace_back(start, options);
  }
  const at::TensorOptions on_device = at::TensorOptions(at::kLong).device(model.device());
  // Rows of the cache: the live sequences of the searches that are not done, in their order.
  std::vector<std::size_t> active(searches.size());
  std::iota(active.begin(), active.end(), 0);
  while (!active.empty()) {
    std::vector<std::int64_t> tokens;
    for (const std::size_t s : active) {
      for (std::size_t live = 0; live < searches[s].num_live(); ++live)
        tokens.push_back(searches[s].last(live));
    }
    const at::Tensor logits_RV = model.decode_step(*cache, at::tensor(tokens, on_device))
                                     .to(at::kCPU, at::kDouble)
                                     .contiguous(),
                     log_sums_R = at::logsumexp(logits_RV, 1);
    const auto vocabulary = static_cast<std::size_t>(logits_RV.size(1));
    const double* logits = logits_RV.const_data_ptr<double>();
    const double* log_sums = log_sums_R.const_data_ptr<double>();

    std::vector<std::size_t> still_active;
    std::vector<std::int64_t> rows;  // of the next cache
    std::int64_t first_row = 0;      // of this search
    bool rows_change = false;
    for (const std::size_t s : active) {
      std::vector<std::span<const double>> of_live;
      std::vector<double> sums_of_live;
      for (std::size_t live = 0; live < searches[s].num_live(); ++live, logits += vocabulary) {
        of_live.emplace_back(logits, vocabulary);
        sums_of_live.push_back(*log_sums++);
        if (!std::isfinite(sums_of_live.back())) {
          fail(ExitCode::kNumerical,
               "the model's probabilities are not finite; use an earlier checkpoint");
        }
      }
      const std::vector<std::size_t> extended = searches[s].advance(of_live, sums_of_live);
      for (const std::size_t live : extended)
        rows.push_back(first_row + static_cast<std::int64_t>(live));
      if (!extended.empty()) still_active.push_back(s);
      first_row += std::ssize(of_live);
    }
    for (std::size_t row = 0; row < rows.size(); ++row)
      rows_change |= rows[row] != static_cast<std::int64_t>(row);
    rows_change |= std::ssize(rows) != first_row;
    active = std::move(still_active);
    if (rows_change && !active.empty()) cache->select_rows(at::tensor(rows, on_device));
  }
  std::vector<FoundSequence> found;
  for (Search& search : searches) found.push_back(search.take());
  return found;
}

}  // namespace birkhoff
