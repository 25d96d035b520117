#include "attention/masked_softmax.h"

#include <ATen/ops/logical_and.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

namespace birkhoff {
namespace {

// Far below any logit, yet finite even after a maximum is subtracted.
double hidden_logit(at::ScalarType dtype) { return dtype == at::kHalf ? -3e4 : -1e30; }

}  // namespace

at::Tensor and_defined(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? at::logical_and(a, b) : a;
}

at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& legal) {
  const auto dtype = scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (!legal.defined()) return at::softmax(scores, -1, dtype).to(scores.scalar_type());
  const at::Tensor hidden = legal.logical_not();
  return at::softmax(scores.masked_fill(hidden, hidden_logit(scores.scalar_type())), -1, dtype)
      .masked_fill(hidden, 0)
      .to(scores.scalar_type());
}

at::Tensor additive_mask(const at::Tensor& legal, at::ScalarType dtype) {
  return at::zeros(legal.sizes(), legal.options().dtype(dtype))
      .masked_fill_(legal.logical_not(), hidden_logit(dtype));
}

at::Tensor drop_probabilities(const at::Tensor& probabilities, float dropout,
                              const std::optional<NoiseKey>& noise) {
  if (!noise || dropout == 0) return probabilities;
  return philox_dropout(probabilities, dropout, *noise, NoisePurpose::kAttentionDropout);
}

}  // namespace birkhoff
