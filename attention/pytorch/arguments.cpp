#include "attention/pytorch/arguments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "attention/kernels/common/limits.h"

namespace birkhoff::ops {
namespace {

void check_float(const char* name, const at::Tensor& x) {
  constexpr std::array kTypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  TORCH_CHECK_VALUE(std::find(kTypes.begin(), kTypes.end(), x.scalar_type()) != kTypes.end(),
                    "birkhoff: ", name, " must be float32, float64, bfloat16 or float16, not ",
                    x.scalar_type());
}

void check_sizes(const char* name, const at::Tensor& x, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, "birkhoff: ", name, " must be int64 ", sizes, ", not ",
                    x.sizes());
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

void check_window(std::int64_t block, std::int64_t look_back, std::int64_t look_ahead,
                  bool causal) {
  if (block != kWholeSequence) check_block(block);
  check_between("look_back", look_back, 0, kMaxBlockTokens);
  check_between("look_ahead", look_ahead, 0, kMaxBlockTokens);
  TORCH_CHECK_VALUE(!causal || look_ahead == 0,
                    "birkhoff: look_ahead must be 0 where attention is causal, not ", look_ahead);
}

constexpr std::array kInputForms = {
    InputForm{"q", "[B, H, L, D]", 4},
    InputForm{"k", "[B, H, L, D]", 4},
    InputForm{"v", "[B, H, L, D]", 4},
    InputForm{"relative_keys", "[H or 1, R, D]", 3},
    InputForm{"relative_values", "[H or 1, R, D]", 3},
    InputForm{"sink", "[H]", 1},
    InputForm{"block weights (or their scores)", "[B, H, N, N]", 4},
};

void check_queries(const at::Tensor& q) {
  TORCH_CHECK_VALUE(q.dim() == 4 && q.numel() > 0,
                    "birkhoff: q must be [B, H, L, D], none of them 0, not ", q.sizes());
}

void check_one_dtype(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK_VALUE(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                    "birkhoff: q, k and v must have one dtype, not ", q.scalar_type(), ", ",
                    k.scalar_type(), " and ", v.scalar_type());
}

// Of k or v, which may have a number of tokens of their own.
void check_like_queries(const at::Tensor& x, const at::Tensor& q, std::int64_t key_heads,
                        std::int64_t num_keys) {
  const bool like = key_heads > 0 && q.size(1) % key_heads == 0 &&
                    x.sizes() == at::IntArrayRef({q.size(0), key_heads, num_keys, q.size(3)});
  TORCH_CHECK_VALUE(like, "birkhoff: k and v must be like q, which is ", q.sizes(),
                    ", except that q may have a multiple of their heads, not ", x.sizes());
}

}  // namespace

void check_between(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  TORCH_CHECK_VALUE(value >= least && value <= most, "birkhoff: ", name, " must be at least ",
                    least, " and at most ", most, ", not ", value);
}

void check_dtype(const char* name, const at::Tensor& x, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.scalar_type() == dtype, "birkhoff: ", name, " must be ", dtype, ", not ",
                    x.scalar_type());
}

void check_device(const char* name, const at::Tensor& x, const at::Tensor& q) {
  TORCH_CHECK_VALUE(x.device() == q.device(), "birkhoff: ", name, " must be on q's device, ",
                    q.device(), ", not on ", x.device());
}

void check_integers(const char* name, const std::optional<at::Tensor>& x, const at::Tensor& q) {
  if (!x) return;
  TORCH_CHECK_VALUE(x->scalar_type() == at::kLong, "birkhoff: ", name, " must be int64, not ",
                    x->scalar_type());
  check_device(name, *x, q);
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

void check_input(const InputForm& form, const at::Tensor& x, const at::Tensor& q) {
  const auto [name, sizes, dim] = form;
  TORCH_CHECK_VALUE(x.dim() == dim, "birkhoff: ", name, " must be ", sizes, ", not ",
                    x.sym_sizes());
  check_float(name, x);
  check_device(name, x, q);
}

void check_inputs(at::TensorList inputs, bool may_have_weights) {
  TORCH_CHECK_VALUE(
      inputs.size() == kRelativeKeys || inputs.size() == kWeights ||
          (may_have_weights && inputs.size() == kWeights + 1),
      "birkhoff: inputs must be q, k, v, or these, relative_keys, relative_values, sink",
      may_have_weights ? " and optionally block weights" : "", ", not ", inputs.size(), " tensors");
  const at::Tensor& q = inputs[kQueries];
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (i != kQueries && i != kValues && is_none(inputs[i])) continue;
    check_input(kInputForms[i], inputs[i], q);
  }
  const at::Tensor& v = inputs[kValues];
  check_one_dtype(q, is_none(inputs[kKeys]) ? v : inputs[kKeys], v);
  for (std::size_t i = kRelativeKeys; i < kWeights; ++i) {
    if (has(inputs, i)) check_dtype(kInputForms[i].name, inputs[i], q.scalar_type());
  }
  TORCH_CHECK_VALUE(!has(inputs, kRelativeValues) || has(inputs, kRelativeKeys),
                    "birkhoff: relative_values need relative_keys");
}

void check_heads(at::TensorList inputs, std::size_t count) {
  TORCH_CHECK_VALUE(inputs.size() == count, "birkhoff: inputs must be ", count, " tensors, not ",
                    inputs.size());
  for (const Input each : {kQueries, kKeys, kValues}) {
    check_input(kInputForms[each], inputs[each], inputs[kQueries]);
  }
  check_one_dtype(inputs[kQueries], inputs[kKeys], inputs[kValues]);
}

void check_sizes_of_heads(at::TensorList inputs, bool square) {
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys];
  check_queries(q);
  TORCH_CHECK_VALUE(k.size(2) > 0, "birkhoff: k must have tokens, not ", k.sizes());
  for (const at::Tensor& x : {k, inputs[kValues]}) {
    check_like_queries(x, q, k.size(1), square ? q.size(2) : k.size(2));
  }
}

void check_sizes_of_inputs(at::TensorList inputs, bool causal, bool square) {
  const at::Tensor& q = inputs[kQueries];
  check_queries(q);
  const std::int64_t H = q.size(1), D = q.size(3), key_heads = inputs[kValues].size(1),
                     num_keys = square ? q.size(2) : inputs[kValues].size(2);
  for (const at::Tensor& x : {inputs[kKeys], inputs[kValues]}) {
    if (!is_none(x)) check_like_queries(x, q, key_heads, num_keys);
  }
  if (has(inputs, kRelativeKeys)) {
    const at::Tensor &keys = inputs[kRelativeKeys], &values = inputs[kRelativeValues];
    const std::int64_t R = keys.size(1);
    TORCH_CHECK_VALUE((keys.size(0) == 1 || keys.size(0) == H) && R > 0 && keys.size(2) == D,
                      "birkhoff: relative_keys must be [", H, " or 1, R, ", D, "], R above 0, not ",
                      keys.sizes());
    TORCH_CHECK_VALUE(causal || R % 2 == 1,
                      "birkhoff: relative_keys must have an odd number of rows "
                      "unless attention is causal: distances from -m to m; not ",
                      R);
    TORCH_CHECK_VALUE(is_none(values) || values.sizes() == keys.sizes(),
                      "birkhoff: relative_values must be like relative_keys, which are ",
                      keys.sizes(), ", not ", values.sizes());
  }
  TORCH_CHECK_VALUE(!has(inputs, kSink) || inputs[kSink].size(0) == H, "birkhoff: sink must be [",
                    H, "], not ", inputs[kSink].sizes());
}

void check_options(at::TensorList inputs, const AttentionInBlocks& call) {
  check_inputs(inputs, /*may_have_weights=*/true);
  check_window(call.block, call.look_back, call.look_ahead, call.causal);
  TORCH_CHECK_VALUE(
      combine_named(call.combine) != Combine::kAddLogits || !has(inputs, kRelativeKeys),
      "birkhoff: combine 'add_logits' has no relative positions");
  check_dropout(call.dropout, call.seed, inputs[kQueries]);
  check_mask_types(inputs[kQueries], call.key_lengths, call.segments);
}

void check_mask_types(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                      const std::optional<at::Tensor>& segments) {
  check_integers("key_lengths", key_lengths, q);
  check_integers("segments", segments, q);
}

void check_lengths(const char* name, const std::optional<at::Tensor>& lengths,
                   const at::Tensor& x) {
  if (!lengths) return;
  check_sizes(name, *lengths, {x.size(0)});
  if (!lengths->is_cpu()) return;
  const auto [least, most] = lengths->aminmax();
  for (const at::Tensor& length : {least, most}) {
    check_between(name, length.item<std::int64_t>(), 0, x.size(2));
  }
}

void check_block(std::int64_t block) { check_between("block", block, 1, kMaxBlockTokens); }

void check_iterations(std::int64_t iterations) {
  check_between("iterations", iterations, 1, kMaxIterations);
}

void check_masks(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                 const std::optional<at::Tensor>& segments) {
  check_lengths("key_lengths", key_lengths, q);
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
  TORCH_CHECK_VALUE(form != Form::kPrefix || scores.size(2) <= kMaxPrefixBlocks,
                    "birkhoff: balance 'prefix' takes at most ", kMaxPrefixBlocks, " blocks, not ",
                    scores.size(2), ": use longer blocks or another balance");
  check_iterations(iterations);
}

}  // namespace birkhoff::ops
