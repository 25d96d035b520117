#include "runtime/decoding/generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <span>

#include "cluster/base/error.h"

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

}  // namespace

void check_options(const GenerateOptions& options) {
  if (options.tokens < 0) {
    fail(ExitCode::kUsage, "tokens: {} is negative", options.tokens);
  }
  check_sampling(options.sampling);
}

std::vector<std::int32_t> generate(Decoder& model, const std::vector<std::int32_t>& prompt_ids,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& take) {
  check_options(options);
  std::vector<std::int32_t> prompt = prompt_ids;
  if (prompt.empty()) {
    require(options.end_mark.has_value(), "generate: an empty prompt without an end mark");
    prompt.push_back(*options.end_mark);
  }

  Window window(model, options.restarts ? options.end_mark : std::nullopt);
  at::Tensor logits_V;
  for (auto id = prompt.begin() + unread_prompt_ids(model, prompt); id != prompt.end(); ++id) {
    logits_V = window.append(*id);
  }
  std::vector<std::int32_t> generated;
  for (std::int64_t n = 0; n < options.tokens; ++n) {
    const std::span<const double> logits(logits_V.const_data_ptr<double>(),
                                         static_cast<std::size_t>(logits_V.numel()));
    const std::int32_t id = sample(logits, options.sampling, options.text, n);
    if (id == options.end_mark) break;
    generated.push_back(id);
    take(id);
    if (n + 1 < options.tokens) logits_V = window.append(id);
  }
  return generated;
}

std::int64_t unread_prompt_ids(const Decoder& model, const std::vector<std::int32_t>& prompt_ids) {
  return std::max<std::int64_t>(std::ssize(prompt_ids) - model.max_tokens(), 0);
}

}  // namespace birkhoff
