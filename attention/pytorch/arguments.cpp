#include "attention/pytorch/arguments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "attention/kernels/common/limits.h"

namespace birkhoff::ops {
namespace {

void check_dtype(const char* name, const at::Tensor& x) {
  constexpr std::array kTypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  TORCH_CHECK_VALUE(std::find(kTypes.begin(), kTypes.end(), x.scalar_type()) != kTypes.end(),
                    "birkhoff: ", name, " must be float32, float64, bfloat16 or float16, not ",
                    x.scalar_type());
}

void check_device(const char* name, const at::Tensor& x, const at::Tensor& q) {
  TORCH_CHECK_VALUE(x.device() == q.device(), "birkhoff: ", name, " must be on q's device, ",
                    q.device(), ", not on ", x.device());
}

void check_between(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  TORCH_CHECK_VALUE(value >= least && value <= most, "birkhoff: ", name, " must be at least ",
                    least, " and at most ", most, ", not ", value);
}

void check_integers(const char* name, const std::optional<at::Tensor>& x, const at::Tensor& q) {
  if (!x) return;
  TORCH_CHECK_VALUE(x->scalar_type() == at::kLong, "birkhoff: ", name, " must be int64, not ",
                    x->scalar_type());
  check_device(name, *x, q);
}

void check_sizes(const char* name, const at::Tensor& x, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, "birkhoff: ", name, " must be int64 ", sizes, ", not ",
                    x.sizes());
}

void check_key_lengths(const at::Tensor& lengths_B, std::int64_t num_tokens) {
  if (!lengths_B.is_cpu()) return;
  const auto [least, most] = lengths_B.aminmax();
  for (const at::Tensor& length : {least, most}) {
    check_between("key_lengths", length.item<std::int64_t>(), 0, num_tokens);
  }
}

void check_segments(const at::Tensor& segments_BL) {
  if (!segments_BL.is_cpu() || segments_BL.size(1) < 2) return;
  const at::Tensor falls = segments_BL.narrow(1, 1, segments_BL.size(1) - 1) <
                           segments_BL.narrow(1, 0, segments_BL.size(1) - 1);
  if (!falls.any().item<bool>()) return;
  const at::Tensor first = falls.nonzero()[0];
  const auto row = first[0].item<std::int64_t>(), token = first[1].item<std::int64_t>();
  const auto id = [&](std::int64_t at) { return segments_BL[row][at].item<std::int64_t>(); };
  TORCH_CHECK_VALUE(false, "birkhoff: segments must never decrease along a row, but row ", row,
                    " falls from ", id(token), " to ", id(token + 1), " at token ", token + 1);
}

void check_inputs(at::TensorList inputs) {
  TORCH_CHECK_VALUE(inputs.size() == 3 || inputs.size() == 4,
                    "birkhoff: inputs must be q, k, v and optionally block weights, not ",
                    inputs.size(), " tensors");
  const at::Tensor& q = inputs[0];
  constexpr std::array kNames = {"q", "k", "v", "block weights (or their scores)"};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK_VALUE(inputs[i].dim() == 4, "birkhoff: ", kNames[i], " must be ",
                      i < 3 ? "[B, H, L, D]" : "[B, H, N, N]", ", not ", inputs[i].sym_sizes());
    check_dtype(kNames[i], inputs[i]);
    check_device(kNames[i], inputs[i], q);
  }
  TORCH_CHECK_VALUE(
      inputs[1].scalar_type() == q.scalar_type() && inputs[2].scalar_type() == q.scalar_type(),
      "birkhoff: q, k and v must have one dtype, not ", q.scalar_type(), ", ",
      inputs[1].scalar_type(), " and ", inputs[2].scalar_type());
}

void check_window(std::int64_t block, std::int64_t look_back, std::int64_t look_ahead,
                  bool causal) {
  if (block != kWholeSequence) check_block(block);
  check_between("look_back", look_back, 0, kMostBlockTokens);
  check_between("look_ahead", look_ahead, 0, kMostBlockTokens);
  TORCH_CHECK_VALUE(!causal || look_ahead == 0,
                    "birkhoff: look_ahead must be 0 where attention is causal, not ", look_ahead);
}

void check_dropout(double dropout, const std::optional<at::Tensor>& seed, const at::Tensor& q) {
  // Checked as a float, because it becomes one: a value that rounds to 1 would divide by 0.
  const auto rounded = static_cast<float>(dropout);
  TORCH_CHECK_VALUE(rounded >= 0 && rounded < 1, "birkhoff: dropout must be in [0, 1), not ",
                    dropout);
  TORCH_CHECK_VALUE(rounded == 0 || seed, "birkhoff: dropout needs a seed of one element");
  TORCH_CHECK_VALUE(!seed || seed->sym_numel() == 1,
                    "birkhoff: seed must have one element, not the sizes ", seed->sym_sizes());
  check_integers("seed", seed, q);
}

}  // namespace

void check_options(at::TensorList inputs, std::int64_t block, std::int64_t look_back,
                   std::int64_t look_ahead, bool causal, std::string_view combine, double dropout,
                   const std::optional<at::Tensor>& seed,
                   const std::optional<at::Tensor>& key_lengths,
                   const std::optional<at::Tensor>& segments) {
  check_inputs(inputs);
  check_window(block, look_back, look_ahead, causal);
  combine_named(combine);
  check_dropout(dropout, seed, inputs[0]);
  check_mask_types(inputs[0], key_lengths, segments);
}

void check_mask_types(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                      const std::optional<at::Tensor>& segments) {
  check_integers("key_lengths", key_lengths, q);
  check_integers("segments", segments, q);
}

void check_block(std::int64_t block) { check_between("block", block, 1, kMostBlockTokens); }

void check_iterations(std::int64_t iterations) {
  check_between("iterations", iterations, 1, kMostIterations);
}

void check_masks(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                 const std::optional<at::Tensor>& segments) {
  if (key_lengths) {
    check_sizes("key_lengths", *key_lengths, {q.size(0)});
    check_key_lengths(*key_lengths, q.size(2));
  }
  if (segments) {
    check_sizes("segments", *segments, {q.size(0), q.size(2)});
    check_segments(*segments);
  }
}

Combine combine_named(std::string_view name) {
  if (name == "concat") return Combine::kConcat;
  if (name == "add_outputs") return Combine::kAddOutputs;
  TORCH_CHECK_VALUE(name == "add_logits", "birkhoff: combine is '", name,
                    "'; it must be concat, add_outputs or add_logits");
  return Combine::kAddLogits;
}

Form form_named(std::string_view name) {
  if (name == "full") return Form::kFull;
  if (name == "prefix") return Form::kPrefix;
  if (name == "cumulative") return Form::kCumulative;
  TORCH_CHECK_VALUE(name == "none", "birkhoff: balance is '", name,
                    "'; it must be full, prefix, cumulative or none");
  return Form::kNone;
}

void check_balance(const at::Tensor& scores, std::int64_t iterations, Form form) {
  TORCH_CHECK_VALUE(scores.dim() == 4 && scores.size(2) == scores.size(3) && scores.numel() > 0,
                    "birkhoff: scores must be [B, H, N, N], not ", scores.sizes());
  TORCH_CHECK_VALUE(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble,
                    "birkhoff: scores must be float32 or float64, not ", scores.scalar_type());
  TORCH_CHECK_VALUE(form != Form::kPrefix || scores.size(2) <= kMostPrefixBlocks,
                    "birkhoff: balance 'prefix' takes at most ", kMostPrefixBlocks, " blocks, not ",
                    scores.size(2), ": use longer blocks or another balance");
  check_iterations(iterations);
}

}  // namespace birkhoff::ops
