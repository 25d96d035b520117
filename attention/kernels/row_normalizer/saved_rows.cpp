#include "attention/kernels/row_normalizer/saved_rows.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>

namespace birkhoff {
namespace {

at::Tensor kept_BL(const RowAttention& in) {
  const at::Tensor visible = in.end_BL - in.first_BL;
  at::Tensor kept = at::full_like(visible, in.normalizer.top_k);
  if (const std::int64_t divisor = in.normalizer.top_divisor; divisor > 0) {
    kept = kept.maximum(at::div(visible + (divisor - 1), divisor, "floor"));
  }
  return kept.minimum(visible.clamp_min(0)).to(at::kInt);
}

at::Tensor exponents(const RowAttention& in) {
  const at::Tensor& alpha_H = in.normalizer.alpha_H;
  if (alpha_H.defined()) return alpha_H.detach().to(at::kDouble).contiguous();
  const double alpha = in.normalizer.kind == Normalizer::kSparsemax ? 2 : 1.5;
  return at::full({in.q_BHLD.size(1)}, alpha, in.q_BHLD.options().dtype(at::kDouble));
}

}  // namespace

std::int64_t max_kept(const RowAttention& in) {
  const std::int64_t num_keys = in.k_BHSD.size(2), divisor = in.normalizer.top_divisor;
  const std::int64_t share = divisor > 0 ? (num_keys + divisor - 1) / divisor : 0;
  return std::min(num_keys, std::max(in.normalizer.top_k, share));
}

SavedRows new_saved_rows(const RowAttention& in) {
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2);
  const auto sums = in.q_BHLD.options().dtype(at::toOpMathType(in.q_BHLD.scalar_type()));
  const auto of_queries = [&](const at::Tensor& x_BL) { return x_BL.expand({B, L}).contiguous(); };
  SavedRows saved;
  saved.first_BL = of_queries(in.first_BL);
  saved.end_BL = of_queries(in.end_BL);
  if (in.normalizer.kind == Normalizer::kTopK) {
    saved.kept_BL = of_queries(kept_BL(in));
    saved.index_BHLk = at::empty({B, H, L, max_kept(in)}, sums.dtype(at::kInt));
    saved.weight_BHLk = at::empty(saved.index_BHLk.sizes(), sums);
  } else {
    saved.alpha_H = exponents(in);
    saved.threshold_BHL = at::empty({B, H, L}, sums);
  }
  return saved;
}

}  // namespace birkhoff
