#include "models/objective.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>

namespace birkhoff {

ObjectiveSums cross_entropy_sums(const at::Tensor& logits_BTV, const at::Tensor& targets_BT,
                                 const at::Tensor& mask_BT) {
  constexpr std::int64_t kIgnored = -100;  // no token id is negative
  const at::ScalarType precision =
      logits_BTV.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor ignored_N = mask_BT.reshape(-1).eq(0);
  const at::Tensor targets_N = targets_BT.reshape(-1).masked_fill(ignored_N, kIgnored);
  const at::Tensor log_probabilities_NV =
      at::log_softmax(logits_BTV.flatten(0, 1), /*dim=*/-1, precision);
  const at::Tensor nats_N =
      at::nll_loss(log_probabilities_NV, targets_N, /*weight=*/{}, at::Reduction::None, kIgnored);
  ObjectiveSums sums;
  sums.loss = nats_N.sum();
  sums.nats = nats_N.detach().sum(at::kDouble);
  sums.count = ignored_N.logical_not().sum(at::kDouble);
  return sums;
}

}  // namespace birkhoff
