#include "attention/kernels/common/masked_softmax.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "attention/kernels/common/grouped_queries.h"

namespace birkhoff {
namespace {

// Far below any logit, yet finite even after a maximum is subtracted.
double hidden_logit(at::ScalarType dtype) { return dtype == at::kHalf ? -3e4 : -1e30; }

}  // namespace

at::Tensor and_defined(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? at::logical_and(a, b) : a;
}

at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& mask,
                          const at::Tensor& sink) {
  if (sink.defined()) {
    std::vector<std::int64_t> sizes = scores.sizes().vec();
    sizes.back() = 1;
    const at::Tensor all = at::cat({scores, sink.expand(sizes)}, -1);
    const at::Tensor all_mask = mask.defined() ? at::constant_pad_nd(mask, {0, 1}, 1) : mask;
    return masked_softmax(all, all_mask).narrow(-1, 0, scores.size(-1));
  }
  const auto dtype = scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (!mask.defined()) return at::softmax(scores, -1, dtype).to(scores.scalar_type());
  const at::Tensor hidden = mask.logical_not();
  return at::softmax(scores.masked_fill(hidden, hidden_logit(scores.scalar_type())), -1, dtype)
      .masked_fill(hidden, 0)
      .to(scores.scalar_type());
}

at::Tensor additive_mask(const at::Tensor& mask, at::ScalarType dtype) {
  return at::zeros(mask.sizes(), mask.options().dtype(dtype))
      .masked_fill_(mask.logical_not(), hidden_logit(dtype));
}

at::Tensor library_attention(const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                             const at::Tensor& v_BHSD, const std::optional<at::Tensor>& bias,
                             bool causal) {
  // A sum of all elements costs almost nothing compared with their products.
  const auto has_nan = [](const at::Tensor& x) { return std::isnan(x.sum().item<double>()); };
  if (!q_BHLD.is_cpu() || !(has_nan(q_BHLD.detach()) || has_nan(k_BHSD.detach()))) {
    return at::scaled_dot_product_attention(q_BHLD, k_BHSD, v_BHSD, bias, 0, causal,
                                            /*scale=*/std::nullopt,
                                            q_BHLD.size(1) != k_BHSD.size(1));
  }
  at::Tensor scores_BHLS =
      at::matmul(q_BHLD, to_query_heads(k_BHSD, q_BHLD.size(1)).transpose(-1, -2)) *
      (1 / std::sqrt(static_cast<double>(q_BHLD.size(3))));
  if (bias) scores_BHLS = scores_BHLS + *bias;
  at::Tensor mask;
  if (causal) {
    mask = at::ones({q_BHLD.size(2), k_BHSD.size(2)}, q_BHLD.options().dtype(at::kBool)).tril_();
  }
  return at::matmul(masked_softmax(scores_BHLS, mask), to_query_heads(v_BHSD, q_BHLD.size(1)));
}

at::Tensor drop_probabilities(const at::Tensor& probabilities, float dropout,
                              const std::optional<NoiseKey>& noise) {
  if (!noise || dropout == 0) return probabilities;
  return philox_dropout(probabilities, dropout, *noise, NoisePurpose::kAttentionDropout);
}

}  // namespace birkhoff
