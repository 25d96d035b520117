// Legend: B batch, H heads, L queries, S keys.
#include "attention/kernels/row_normalizer/row_normalizer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <vector>

#include "attention/kernels/common/masked_softmax.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// x^y, 0 where x is 0; NaN stays NaN, also with y = 0.
at::Tensor power(const at::Tensor& x, const at::Tensor& y) {
  return x.pow(y).masked_fill(x <= 0, 0) + (x - x);
}

// Entmax of scores [B, H, L, S], -infinity where hidden, with exponents alpha [H, 1, 1]. The
// threshold is found by bisection between bounds at which the weights sum to at least 1 and at most
// 1 (Blondel et al. 2020, section 5).
struct Entmax : torch::autograd::Function<Entmax> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            const at::Tensor& alpha) {
    const at::Tensor excess = alpha - 1, inverse = excess.reciprocal();
    const at::Tensor top = scores.amax(-1, /*keepdim=*/true);
    // Scores less their maximum, which is 0; hidden keys and rows without a visible key stay
    // hidden.
    const at::Tensor z = (scores - top.masked_fill(top == -kInfinity, 0)) * excess;
    at::Tensor low = at::full_like(top, -1);
    const double keys = static_cast<double>(scores.size(-1));
    at::Tensor high = -at::pow(at::full_like(excess, 1 / keys), excess).expand_as(top);
    const auto weights = [&](const at::Tensor& t) { return power((z - t).clamp_min(0), inverse); };
    const int iterations = scores.scalar_type() == at::kDouble ? 64 : 32;
    for (int i = 0; i < iterations; ++i) {
      const at::Tensor middle = (low + high) / 2;
      const at::Tensor too_low = weights(middle).sum(-1, /*keepdim=*/true) >= 1;
      low = at::where(too_low, middle, low);
      high = at::where(too_low, high, middle);
    }
    at::Tensor p = weights(low);
    const at::Tensor sum = p.sum(-1, /*keepdim=*/true);
    p = p / sum.masked_fill(sum == 0, 1);
    context->save_for_backward({p, alpha});
    return p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &p = saved[0], &alpha = saved[1], &d_p = gradients[0];
    const at::Tensor r = power(p, 2 - alpha), sum = r.sum(-1, /*keepdim=*/true),
                     share = r / sum.masked_fill(sum == 0, 1);
    const at::Tensor d_scores = r * (d_p - (share * d_p).sum(-1, /*keepdim=*/true));
    at::Tensor d_alpha;
    if (context->needs_input_grad(1)) {  // Correia et al. 2019, proposition 1
      const at::Tensor excess = alpha - 1, entropy = -p * p.masked_fill(p == 0, 1).log();
      const at::Tensor slope = (p - share) / excess.square() +
                               (entropy - share * entropy.sum(-1, /*keepdim=*/true)) / excess;
      d_alpha = (slope * d_p).sum({0, 2, 3}).view_as(alpha);
    }
    return {d_scores, d_alpha};
  }
};

// bool [B, H, L, S]: the keys that top-k keeps.
at::Tensor kept_keys(const RowNormalizer& normalizer, const at::Tensor& scores,
                     const at::Tensor& mask) {
  const at::Tensor seen =
      mask.defined() ? scores.masked_fill(mask.logical_not(), -kInfinity) : scores;
  at::Tensor k = at::full({1}, normalizer.top_k, scores.options().dtype(at::kLong));
  if (normalizer.top_divisor > 0) {
    const at::Tensor visible = mask.defined() ? mask.expand_as(scores).sum(-1, /*keepdim=*/true)
                                              : at::full({1}, scores.size(-1), k.options());
    k = k.maximum(at::div(visible + (normalizer.top_divisor - 1), normalizer.top_divisor, "floor"));
  }
  const auto [sorted, order] = at::sort(seen, /*stable=*/true, -1, /*descending=*/true);
  at::Tensor kept;
  if (normalizer.keep_ties) {
    const at::Tensor last = (k.clamp_max(scores.size(-1)) - 1).expand_as(sorted.narrow(-1, 0, 1));
    kept = seen >= sorted.gather(-1, last);
  } else {
    const at::Tensor first = at::arange(scores.size(-1), k.options()) < k;
    kept = at::zeros_like(seen, at::kBool).scatter_(-1, order, first.expand_as(order));
  }
  return mask.defined() ? at::logical_and(kept, mask) : kept;
}

at::Tensor entmax(const at::Tensor& scores, const at::Tensor& mask, const at::Tensor& sink,
                  const at::Tensor& alpha) {
  std::vector<std::int64_t> sizes = scores.sizes().vec();
  const std::int64_t num_keys = sizes.back();
  sizes.back() = 1;
  at::Tensor all = mask.defined() ? scores.masked_fill(mask.logical_not(), -kInfinity) : scores;
  // A query that sees no key gets nothing, though the sink is there.
  if (sink.defined()) {
    const at::Tensor sees = (all > -kInfinity).any(-1, /*keepdim=*/true);
    all = at::cat({all, sink.expand(sizes).masked_fill(sees.logical_not(), -kInfinity)}, -1);
  }
  return Entmax::apply(all, alpha).narrow(-1, 0, num_keys);
}

}  // namespace

at::Tensor normalize_rows(const RowNormalizer& normalizer, const at::Tensor& scores_BHLS,
                          const at::Tensor& mask, const at::Tensor& sink_H) {
  const auto dtype = scores_BHLS.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor scores = scores_BHLS.to(dtype);
  const at::Tensor sink = sink_H.defined() ? sink_H.to(dtype).view({1, -1, 1, 1}) : at::Tensor();
  const auto exponent = [&](double alpha) { return at::full({1, 1, 1}, alpha, scores.options()); };
  at::Tensor p;
  switch (normalizer.kind) {
    case Normalizer::kSoftmax:
      p = masked_softmax(scores, mask, sink);
      break;
    case Normalizer::kTopK:
      p = masked_softmax(scores, kept_keys(normalizer, scores.detach(), mask), sink);
      break;
    case Normalizer::kSparsemax:
      p = entmax(scores, mask, sink, exponent(2));
      break;
    case Normalizer::kEntmax15:
      p = entmax(scores, mask, sink, exponent(1.5));
      break;
    case Normalizer::kEntmax:
      p = entmax(scores, mask, sink, normalizer.alpha_H.to(dtype).view({-1, 1, 1}));
      break;
  }
  return p.to(scores_BHLS.scalar_type());
}

}  // namespace birkhoff
