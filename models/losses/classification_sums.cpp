#include "models/losses/classification_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>

#include <vector>

#include "configs/loader/check.h"

namespace birkhoff {
namespace {

constexpr char kAccuracy[] = "accuracy";

LossSums weighted_sums(const at::Tensor& logits_BK, const at::Tensor& labels_B,
                       const at::Tensor& weight_B) {
  const at::ScalarType precision =
      logits_BK.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor nats_B = at::nll_loss(at::log_softmax(logits_BK, /*dim=*/-1, precision),
                                         labels_B, /*weight=*/{}, at::Reduction::None);
  LossSums sums;
  sums.loss = (nats_B * weight_B).sum();
  sums.nats = nats_B.detach().sum(at::kDouble);
  sums.count = at::ones_like(labels_B).sum(at::kDouble);
  sums.weight = weight_B.sum(at::kDouble);
  return sums;
}

}  // namespace

at::Tensor class_weights(const configs::Task& task, const at::TensorOptions& options) {
  const std::vector<float> weights = class_weights(task);
  return weights.empty() ? at::Tensor() : at::tensor(weights, at::kFloat).to(options);
}

at::Tensor training_weights(const at::Tensor& class_weight_K, const Batch& batch,
                            const std::optional<NoiseKey>& noise) {
  if (!noise || !class_weight_K.defined()) return {};
  return class_weight_K.index_select(0, batch.at(field::kLabels));
}

LossSums classification_sums(const at::Tensor& logits_BK, const at::Tensor& labels_B,
                             const at::Tensor& weight_B) {
  // Before the loss, which may overwrite the logits.
  const at::Tensor predicted_B = logits_BK.detach().argmax(-1);
  LossSums sums =
      weight_B.defined()
          ? weighted_sums(logits_BK, labels_B, weight_B)
          : cross_entropy_sums(logits_BK.unsqueeze(1), labels_B.unsqueeze(1),
                               at::ones_like(labels_B, at::TensorOptions(at::kByte)).unsqueeze(1));
  sums.named.emplace_back(kAccuracy, predicted_B.eq(labels_B).sum(at::kDouble));
  sums.predicted_B = predicted_B;
  return sums;
}

Figure accuracy_figure() { return {.sum = kAccuracy, .per = ""}; }

}  // namespace birkhoff
