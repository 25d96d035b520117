#include "attention/pytorch/all_pairs_calls.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/limits.h"
#include "attention/kernels/row_normalizer/row_attention.h"
#include "attention/kernels/sinkformer/sinkformer.h"
#include "attention/pytorch/arguments.h"
#include "attention/pytorch/differentiate.h"

namespace birkhoff::ops {
namespace {

constexpr std::size_t kExponents = 3;  // after q, k and v

void check(const AttentionByRows& call, at::TensorList inputs) {
  check_heads(inputs, kExponents + 1);
  const at::Tensor &q = inputs[kQueries], &alpha = inputs[kExponents];
  if (is_none(alpha)) {
    check_between("count", call.count, 1, kMaxBlockTokens);
    TORCH_CHECK_VALUE(!call.learns, "birkhoff: without alpha, nothing learns");
  } else {
    check_input({.name = "alpha", .sizes = "[H] or of one element", .dim = 1}, alpha, q);
  }
  check_dropout(call.dropout, call.seed, q);
  check_mask_types(q, call.key_lengths, call.segments);
}

void check_exponents(const at::Tensor& alpha, std::int64_t heads) {
  TORCH_CHECK_VALUE(alpha.size(0) == heads, "birkhoff: alpha must be [", heads,
                    "] or of one element, not ", alpha.sizes());
  if (!alpha.is_cpu()) return;
  const at::Tensor wrong = at::logical_and(alpha > 1, alpha <= 2).logical_not();
  TORCH_CHECK_VALUE(!wrong.any().item<bool>(),
                    "birkhoff: alpha must be above 1 and at most 2, not ",
                    alpha.detach().masked_select(wrong)[0].item<double>());
}

// A checked call, differentiable in the inputs.
RowAttention attention_of(const AttentionByRows& call, at::TensorList inputs) {
  check(call, inputs);
  check_sizes_of_heads(inputs, /*square=*/call.causal || call.segments);
  const at::Tensor &q = inputs[kQueries], &k = inputs[kKeys], &alpha = inputs[kExponents];
  check_masks(k, call.key_lengths, call.segments);
  RowAttention in{.q_BHLD = q,
                  .k_BHSD = k,
                  .v_BHSD = inputs[kValues],
                  .first_BL = {},
                  .end_BL = {},
                  .normalizer = {.kind = Normalizer::kTopK, .top_k = call.count},
                  .dropout = static_cast<float>(call.dropout),
                  .noise = noise_of(call.dropout, call.seed, q)};
  if (!is_none(alpha)) {
    check_exponents(alpha, q.size(1));
    in.normalizer = {.kind = Normalizer::kEntmax, .alpha_H = call.learns ? alpha : alpha.detach()};
  }
  const at::Tensor documents = call.segments.value_or(at::Tensor());
  set_key_ranges(in, call.causal, call.key_lengths.value_or(at::Tensor()), documents, documents);
  return in;
}

// Differentiable, on any device and in any dtype.
at::Tensor attend(const RowAttention& in) {
  if (why_not_row_kernels(in).empty()) return attend_rows(in);
  const at::Tensor key_S = at::arange(in.k_BHSD.size(2), in.first_BL.options());
  const at::Tensor sees_BLS =
      at::logical_and(key_S >= in.first_BL.unsqueeze(2), key_S < in.end_BL.unsqueeze(2));
  return reference_rows(in, sees_BLS.unsqueeze(1), /*sink_H=*/{});
}

BalanceGradient gradient_named(std::string_view name) {
  if (name == "unrolled") return BalanceGradient::kUnrolled;
  if (name == "implicit") return BalanceGradient::kImplicit;
  TORCH_CHECK_VALUE(name == "truncated", "birkhoff: gradient is '", name,
                    "'; it must be unrolled, implicit or truncated");
  return BalanceGradient::kTruncated;
}

void check(const DoublyStochasticOperation& call, at::TensorList inputs) {
  check_heads(inputs, kExponents);
  TORCH_CHECK_VALUE(
      call.half_steps >= 1 && call.half_steps <= kMaxHalfSteps && call.half_steps % 2 == 1,
      "birkhoff: half_steps must be odd, at least 1 and at most ", kMaxHalfSteps, ", not ",
      call.half_steps);
  gradient_named(call.gradient);
  check_dropout(call.dropout, call.seed, inputs[kQueries]);
  check_integers("query_lengths", call.query_lengths, inputs[kQueries]);
  check_integers("key_lengths", call.key_lengths, inputs[kQueries]);
}

// A checked call, differentiable in the inputs.
DoublyStochasticAttention attention_of(const DoublyStochasticOperation& call,
                                       at::TensorList inputs) {
  check(call, inputs);
  check_sizes_of_heads(inputs, /*square=*/false);
  check_lengths("query_lengths", call.query_lengths, inputs[kQueries]);
  check_lengths("key_lengths", call.key_lengths, inputs[kKeys]);
  const auto contiguous = [](const OptionalTensor& lengths) {
    return lengths ? lengths->contiguous() : at::Tensor();
  };
  return {.q_BHLD = inputs[kQueries],
          .k_BHSD = inputs[kKeys],
          .v_BHSD = inputs[kValues],
          .query_lengths_B = contiguous(call.query_lengths),
          .key_lengths_B = contiguous(call.key_lengths),
          .same_document_BLS = {},
          .half_steps = static_cast<int>(call.half_steps),
          .gradient = gradient_named(call.gradient),
          .dropout = static_cast<float>(call.dropout),
          .noise = noise_of(call.dropout, call.seed, inputs[kQueries])};
}

at::Tensor attend(const DoublyStochasticAttention& in) {
  return attend_doubly_stochastic(in, Path::kFused);
}

// What the backward pass reads of the forward pass.
std::vector<Expected> saved_of(const RowAttention& in) {
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2);
  const at::ScalarType sums = at::toOpMathType(in.q_BHLD.scalar_type());
  if (in.normalizer.kind == Normalizer::kEntmax) return {{"threshold", sums, {B, H, L}}};
  const std::int64_t kept = std::min(in.normalizer.top_k, in.k_BHSD.size(2));
  return {{"index", at::kInt, {B, H, L, kept}}, {"weight", sums, {B, H, L, kept}}};
}
std::vector<Expected> saved_of(const DoublyStochasticAttention& in) {
  const at::Tensor& q = in.q_BHLD;
  const at::ScalarType sums = at::toOpMathType(q.scalar_type());
  const std::int64_t B = q.size(0), H = q.size(1), L = q.size(2), pairs = in.half_steps / 2;
  return {{"exact_out", sums, {B, H, L, q.size(3)}},
          {"rows", sums, {B, H, pairs + 1, L}},
          {"columns", sums, {B, H, pairs, in.k_BHSD.size(2)}}};
}

// Whether the backward pass reads it: of the CPU kernels.
bool has_two_passes(const RowAttention& in) {
  return in.q_BHLD.is_cpu() && why_not_row_kernels(in).empty();
}
bool has_two_passes(const DoublyStochasticAttention& in) {
  return in.q_BHLD.is_cpu() && choose_path(in, Path::kFused) == Path::kFused;
}

Tensors results_of(const RowAttention& in) {
  const RowResults made = fused_forward(in);
  if (in.normalizer.kind == Normalizer::kEntmax) return {made.out_BHLD, made.threshold_BHL};
  return {made.out_BHLD, made.index_BHLk, made.weight_BHLk};
}
Tensors results_of(const DoublyStochasticAttention& in) {
  const SinkformerResults made = fused_forward(in);
  return {made.out_BHLD, made.exact_out_BHLD, made.rows_BHtL, made.columns_BHtS};
}

Differentiated gradients_of(const RowAttention& in, at::TensorList saved, const at::Tensor& d_out) {
  Tensors values{in.q_BHLD, in.k_BHSD, in.v_BHSD};
  const at::Tensor& alpha = in.normalizer.alpha_H;
  const bool learns = alpha.defined() && alpha.requires_grad();
  if (learns) values.push_back(alpha);
  RowResults results;
  if (in.normalizer.kind == Normalizer::kEntmax) {
    results.threshold_BHL = saved[0];
  } else {
    results.index_BHLk = saved[0];
    results.weight_BHLk = saved[1];
  }
  return {values, fused_backward(in, results, d_out, learns)};
}
Differentiated gradients_of(const DoublyStochasticAttention& in, at::TensorList saved,
                            const at::Tensor& d_out) {
  return {{in.q_BHLD, in.k_BHSD, in.v_BHSD},
          fused_backward(in,
                         {.out_BHLD = {},
                          .exact_out_BHLD = saved[0],
                          .rows_BHtL = saved[1],
                          .columns_BHtS = saved[2]},
                         d_out)};
}

// ---- Both operators.

template <typename Attention>
Attention with_query_heads(Attention in) {
  in.k_BHSD = to_query_heads(in.k_BHSD, in.q_BHLD.size(1));
  in.v_BHSD = to_query_heads(in.v_BHSD, in.q_BHLD.size(1));
  return in;
}

template <typename Call>
Tensors forward_of(const Call& call, at::TensorList inputs) {
  const auto in = attention_of(call, inputs);
  const c10::OptionalDeviceGuard guard(in.q_BHLD.device());
  Tensors results;
  if (has_two_passes(in)) {
    results = results_of(with_query_heads(in));
  } else {
    results = {attend(in)};
    for (const Expected& each : saved_of(in)) {
      results.push_back(at::zeros(each.sizes, in.q_BHLD.options().dtype(each.dtype)));
    }
  }
  results[0] = laid_out_as(in.q_BHLD, results[0]);
  return results;
}

template <typename Call>
Tensors backward_of(const Call& call, at::TensorList gradients, at::TensorList inputs,
                    at::TensorList saved) {
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        const auto in = attention_of(call, x);
        const c10::OptionalDeviceGuard guard(in.q_BHLD.device());
        check_given(gradients, {{"d_out", in.q_BHLD.scalar_type(), in.q_BHLD.sizes().vec()}});
        check_given(saved, saved_of(in));
        if (!has_two_passes(in)) return {{attend(in)}, {gradients[0]}};
        const auto of_kernel = with_query_heads(in);
        const c10::AutoGradMode without_gradients(false);
        return gradients_of(of_kernel, saved, gradients[0]);
      },
      inputs);
}

}  // namespace

Tensors AttentionByRows::forward(at::TensorList inputs) const { return forward_of(*this, inputs); }

Tensors AttentionByRows::backward(at::TensorList gradients, at::TensorList inputs,
                                  at::TensorList saved) const {
  return backward_of(*this, gradients, inputs, saved);
}

Tensors AttentionByRows::meta(at::TensorList inputs) const {
  check(*this, inputs);
  const at::Tensor& q = inputs[kQueries];
  const auto sums = q.options().dtype(at::toOpMathType(q.scalar_type()));
  std::vector<c10::SymInt> sizes{q.sym_size(0), q.sym_size(1), q.sym_size(2)};
  if (!is_none(inputs[kExponents])) return {at::empty_like(q), at::empty_symint(sizes, sums)};
  sizes.push_back(inputs[kKeys].sym_size(2).min(count));
  return {at::empty_like(q), at::empty_symint(sizes, sums.dtype(at::kInt)),
          at::empty_symint(sizes, sums)};
}

Tensors DoublyStochasticOperation::forward(at::TensorList inputs) const {
  return forward_of(*this, inputs);
}

Tensors DoublyStochasticOperation::backward(at::TensorList gradients, at::TensorList inputs,
                                            at::TensorList saved) const {
  return backward_of(*this, gradients, inputs, saved);
}

Tensors DoublyStochasticOperation::meta(at::TensorList inputs) const {
  check(*this, inputs);
  const at::Tensor& q = inputs[kQueries];
  const auto sums = q.options().dtype(at::toOpMathType(q.scalar_type()));
  const c10::SymInt B = q.sym_size(0), H = q.sym_size(1), L = q.sym_size(2), pairs = half_steps / 2;
  return {at::empty_like(q), at::empty_symint({B, H, L, q.sym_size(3)}, sums),
          at::empty_symint({B, H, pairs + 1, L}, sums),
          at::empty_symint({B, H, pairs, inputs[kKeys].sym_size(2)}, sums)};
}

}  // namespace birkhoff::ops
