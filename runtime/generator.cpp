#include "runtime/generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// The cache of one sequence; it never overflows.
class Window {
 public:
  Window(Decoder& model, std::optional<std::int32_t> restart_after)
      : model_(model), restart_after_(restart_after) {
    clear();
  }

  // Appends a token and returns the fp64 logits [V] of the next one.
  at::Tensor append(std::int32_t token) {
    if (!tokens_.empty() && tokens_.back() == restart_after_) {
      clear();
      tokens_.clear();
    }
    if (length_ == model_.max_tokens()) {
      clear();
      const std::int64_t kept = std::max<std::int64_t>(model_.max_tokens() / 2, 1) - 1;
      for (auto past = tokens_.end() - kept; past != tokens_.end(); ++past) step(*past);
    }
    tokens_.push_back(token);
    return step(token);
  }

 private:
  at::Tensor step(std::int32_t token) {
    ++length_;
    const at::Tensor token_B =
        at::full({1}, token, at::TensorOptions(at::kLong).device(model_.device()));
    return model_.decode_step(*cache_, token_B).squeeze(0).to(at::kDouble).cpu();
  }

  void clear() {
    cache_ = model_.decode_cache(1);
    length_ = 0;
  }

  Decoder& model_;
  std::optional<std::int32_t> restart_after_;
  std::unique_ptr<DecodeCache> cache_;
  std::int64_t length_ = 0;           // tokens in the cache
  std::vector<std::int32_t> tokens_;  // since the last restart
};

// The `count` likeliest ids, the likeliest first; equals by id.
std::vector<std::int32_t> likeliest(const at::Tensor& logits_V, std::int64_t count) {
  const double* logits = logits_V.const_data_ptr<double>();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(logits_V.numel()));
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](auto a, auto b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  ids.resize(static_cast<std::size_t>(count));
  return ids;
}

// Draws from softmax(logits / temperature) over the ids that top_k and then top_p leave, by
// inverting its cumulative sum at u in (0, 1].
std::int32_t sample(const at::Tensor& logits_V, const GenerateOptions& options, double u) {
  const std::int64_t vocabulary = logits_V.numel();
  const std::int64_t count = options.top_k == 0 ? vocabulary : std::min(options.top_k, vocabulary);
  const std::vector<std::int32_t> ids = likeliest(logits_V, options.temperature == 0 ? 1 : count);
  if (options.temperature == 0) return ids.front();
  const double* logits = logits_V.const_data_ptr<double>();
  std::vector<double> cumulative;
  double sum = 0;
  for (const std::int32_t id : ids) {
    sum += std::exp((logits[id] - logits[ids.front()]) / options.temperature);
    cumulative.push_back(sum);
  }
  const auto last = std::lower_bound(cumulative.begin(), cumulative.end(), options.top_p * sum);
  const auto chosen = std::lower_bound(cumulative.begin(), last, u * *last);
  return ids[static_cast<std::size_t>(chosen - cumulative.begin())];
}

}  // namespace

void check_options(const GenerateOptions& options) {
  if (options.tokens < 0) {
    fail(ExitCode::kUsage, "tokens: {} is negative", options.tokens);
  }
  if (!(options.temperature >= 0 && std::isfinite(options.temperature))) {
    fail(ExitCode::kUsage, "temperature: {} is not a finite number of at least 0",
         options.temperature);
  }
  if (options.top_k < 0) {
    fail(ExitCode::kUsage, "top-k: {} is negative; 0 means all ids", options.top_k);
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    fail(ExitCode::kUsage, "top-p: {} is not above 0 and at most 1; 1 means all ids",
         options.top_p);
  }
}

std::vector<std::int32_t> generate(Decoder& model, const std::vector<std::int32_t>& prompt_ids,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& take) {
  check_options(options);
  std::vector<std::int32_t> prompt = prompt_ids;
  if (prompt.empty()) prompt.push_back(options.first);

  Window window(model, options.restart_after);
  at::Tensor logits_V;
  for (auto id = prompt.begin() + unread_prompt_ids(model, prompt); id != prompt.end(); ++id) {
    logits_V = window.append(*id);
  }
  std::vector<std::int32_t> generated;
  for (std::int64_t n = 0; n < options.tokens; ++n) {
    const std::uint64_t key = noise_key(options.seed, static_cast<std::uint64_t>(n), /*layer=*/0,
                                        NoisePurpose::kSampling);
    const float u = uniform_from_bits(philox(key, options.text, 0)[0]);
    generated.push_back(sample(logits_V, options, u));
    take(generated.back());
    if (n + 1 < options.tokens) logits_V = window.append(generated.back());
  }
  return generated;
}

std::int64_t unread_prompt_ids(const Decoder& model, const std::vector<std::int32_t>& prompt_ids) {
  return std::max<std::int64_t>(std::ssize(prompt_ids) - model.max_tokens(), 0);
}

}  // namespace birkhoff
