#include "models/losses/classification_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/ones_like.h>

namespace birkhoff {
namespace {

constexpr char kAccuracy[] = "accuracy";

}  // namespace

LossSums classification_sums(const at::Tensor& logits_BK, const at::Tensor& labels_B) {
  // Before the loss, which may overwrite the logits.
  const at::Tensor correct = logits_BK.detach().argmax(-1).eq(labels_B).sum(at::kDouble);
  LossSums sums =
      cross_entropy_sums(logits_BK.unsqueeze(1), labels_B.unsqueeze(1),
                         at::ones_like(labels_B, at::TensorOptions(at::kByte)).unsqueeze(1));
  sums.named.emplace_back(kAccuracy, correct);
  return sums;
}

Figure accuracy_figure() { return {.sum = kAccuracy, .per = ""}; }

}  // namespace birkhoff
