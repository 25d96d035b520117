#include "runtime/decoding/likelihood.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "cluster/base/error.h"
#include "cluster/base/interval.h"
#include "data/batch/padded_texts.h"

namespace birkhoff {

namespace {

// The fields of documents that follow one another in a text, each from position 0 on.
void add_documents(Batch& batch, std::int64_t end_mark) {
  const at::Tensor& inputs_BT = batch.at(field::kInputs);
  const at::Tensor segments_BT = at::zeros(inputs_BT.sizes(), at::kInt),
                   positions_BT = at::zeros(inputs_BT.sizes(), at::kLong);
  const auto* inputs = inputs_BT.const_data_ptr<std::int64_t>();
  auto* segments = segments_BT.mutable_data_ptr<std::int32_t>();
  auto* positions = positions_BT.mutable_data_ptr<std::int64_t>();
  const std::int64_t length = inputs_BT.size(1);
  for (std::int64_t i = 0; i < inputs_BT.numel(); ++i) {
    if (i % length == 0) continue;
    const bool begins = inputs[i - 1] == end_mark;
    segments[i] = segments[i - 1] + (begins ? 1 : 0);
    batch.num_documents = std::max<std::int64_t>(batch.num_documents, segments[i] + 1);
    positions[i] = begins ? 0 : positions[i - 1] + 1;
  }
  batch.fields.emplace(field::kSegments, segments_BT);
  batch.fields.emplace(field::kPositions, positions_BT);
}

// The logarithms [B, T] of the sums of exponentials, in fp64: of few of the N = B T rows at a time.
at::Tensor log_sums(const at::Tensor& logits_BTV) {
  const at::Tensor logits_NV = logits_BTV.flatten(0, 1),
                   sums_N = at::empty({logits_NV.size(0)}, logits_NV.options().dtype(at::kDouble));
  const std::int64_t rows = std::max<std::int64_t>(1, (1 << 22) / logits_NV.size(1));
  for (std::int64_t begin = 0; begin < sums_N.size(0); begin += rows) {
    const std::int64_t count = std::min(rows, sums_N.size(0) - begin);
    sums_N.narrow(0, begin, count)
        .copy_(at::logsumexp(logits_NV.narrow(0, begin, count).to(at::kDouble), 1));
  }
  return sums_N.view({logits_BTV.size(0), logits_BTV.size(1)});
}

[[noreturn]] void fail_as_not_finite() {
  fail(ExitCode::kNumerical,
       "the model's log-probabilities are not finite; use an earlier checkpoint");
}

struct Prediction {
  at::Tensor logits_BTV;  // on the model's device
  at::Tensor targets_BT;  // on the CPU; padded
  // The places of a text's counted tokens among the B T of the batch.
  Interval counted(std::int64_t text, const ScoredTokens& tokens) const {
    const std::int64_t end = text * targets_BT.size(1) + std::ssize(tokens.ids) - 1;
    return {end - tokens.num_counted, end};
  }
};

Prediction predict(TokenScorer& model, const std::vector<ScoredTokens>& texts,
                   std::optional<std::int32_t> restart_after) {
  std::vector<std::span<const std::int32_t>> inputs, targets, sources;
  for (const ScoredTokens& text : texts) {
    require(text.num_counted >= 1 && text.num_counted < std::ssize(text.ids) &&
                std::ssize(text.ids) <= model.max_tokens() + 1,
            "likelihoods: the number of ids");
    require(text.source.empty() == texts.front().source.empty(), "likelihoods: a missing source");
    const std::span<const std::int32_t> ids(text.ids);
    inputs.push_back(ids.first(ids.size() - 1));
    targets.push_back(ids.subspan(1));
    sources.emplace_back(text.source);
  }
  // Padded behind the text, where causal models do not look.
  const at::Tensor inputs_BT = padded_ids(inputs), targets_BT = padded_ids(targets);
  const std::int64_t longest = inputs_BT.size(1);
  Batch batch;
  if (texts.front().source.empty()) {
    batch.fields.emplace(field::kInputs, inputs_BT);
    batch.sample_ids_B = at::zeros({inputs_BT.size(0)}, at::kLong);
  } else {
    batch = padded_texts(sources);
    batch.fields.emplace(field::kPrevious, inputs_BT);
    batch.fields.emplace(
        field::kMask, at::arange(longest).lt(numbers_of_ids(targets).unsqueeze(1)).to(at::kByte));
  }
  if (restart_after) add_documents(batch, *restart_after);
  return {model.logits(batch.to(model.device()), std::nullopt), targets_BT};
}

}  // namespace

std::vector<Likelihood> likelihoods(TokenScorer& model, const std::vector<ScoredTokens>& texts,
                                    std::optional<std::int32_t> restart_after) {
  const c10::AutoGradMode no_gradients(false);
  const Prediction prediction = predict(model, texts, restart_after);
  const auto& [logits_BTV, targets_BT] = prediction;
  const at::Tensor of_targets_BT =
      logits_BTV.gather(2, targets_BT.to(model.device()).unsqueeze(2)).squeeze(2);
  const at::Tensor log_p_BT =
      (of_targets_BT.to(at::kDouble) - log_sums(logits_BTV)).cpu().contiguous();
  const at::Tensor likeliest_BT = at::argmax(logits_BTV, 2).cpu().contiguous();

  std::vector<Likelihood> results;
  for (const ScoredTokens& text : texts) {
    Likelihood likelihood{.num_tokens = text.num_counted};
    const auto [begin, end] = prediction.counted(std::ssize(results), text);
    for (std::int64_t i = begin; i < end; ++i) {
      likelihood.log_probability += log_p_BT.const_data_ptr<double>()[i];
      likelihood.is_greedy &= likeliest_BT.const_data_ptr<std::int64_t>()[i] ==
                              targets_BT.const_data_ptr<std::int64_t>()[i];
    }
    if (!std::isfinite(likelihood.log_probability)) fail_as_not_finite();
    results.push_back(likelihood);
  }
  return results;
}

std::vector<std::vector<std::int32_t>> likeliest_tokens(TokenScorer& model,
                                                        const std::vector<ScoredTokens>& texts) {
  const c10::AutoGradMode no_gradients(false);
  const Prediction prediction = predict(model, texts, std::nullopt);
  const auto [most_BT, id_BT] = prediction.logits_BTV.max(2);
  const at::Tensor likeliest_BT = id_BT.to(at::kCPU, at::kInt).contiguous(),
                   largest_BT = most_BT.to(at::kCPU, at::kDouble).contiguous();
  std::vector<std::vector<std::int32_t>> results;
  for (const ScoredTokens& text : texts) {
    const auto [begin, end] = prediction.counted(std::ssize(results), text);
    const double* largest = largest_BT.const_data_ptr<double>();
    if (!std::all_of(largest + begin, largest + end, [](double x) { return std::isfinite(x); }))
      fail_as_not_finite();
    const auto* likeliest = likeliest_BT.const_data_ptr<std::int32_t>();
    results.emplace_back(likeliest + begin, likeliest + end);
  }
  return results;
}

}  // namespace birkhoff
