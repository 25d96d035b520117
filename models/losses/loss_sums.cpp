#include "models/losses/loss_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/tensors/second_gradient.h"
#include "models/losses/fused_cross_entropy.h"

namespace birkhoff {
namespace {

// The gradient overwrites the logits. Nothing reads them afterwards: the linear layer that made
// them keeps only its inputs.
struct FusedCrossEntropy : torch::autograd::Function<FusedCrossEntropy> {
  // Returns the sum of the losses, and the nats [N], which have no gradient.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& logits_NV,
                                                const at::Tensor& targets_N,
                                                const at::Tensor& mask_N, double label_smoothing) {
    const at::Tensor memory_NV = logits_NV.detach();
    const auto [nats_N, losses_N] =
        fused_cross_entropy_(memory_NV, targets_N, mask_N, label_smoothing);
    context->saved_data["gradients"] = memory_NV;
    context->mark_non_differentiable({nats_N});
    return {losses_N.sum(), nats_N};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    refuse_second_gradient();
    const at::Tensor d_logits_NV = context->saved_data["gradients"].toTensor();
    scale_gradients_(d_logits_NV, gradients[0]);
    return {d_logits_NV, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

void add_layer_sums(const NamedSums& layers, LossSums& sums, ProcessGroup* tensor_group,
                    const at::Tensor& targets_per_token_B, const at::Tensor& weight_B) {
  const std::size_t first = sums.named.size();
  for (const auto& [name, value] : layers) {
    if (!name.ends_with(".auxiliary_loss")) {
      sums.named.emplace_back(name, value.detach());
      continue;
    }
    const at::Tensor loss_B = targets_per_token_B.defined() ? value * targets_per_token_B : value;
    const at::Tensor loss = loss_B.sum();
    sums.loss = sums.loss + (weight_B.defined() ? (loss_B * weight_B).sum() : loss);
    sums.named.emplace_back(name, loss.detach());
  }
  if (tensor_group == nullptr) return;
  std::vector<at::Tensor> of_figures;
  for (std::size_t i = first; i < sums.named.size(); ++i) {
    if (sums.named[i].second.dim() == 0) of_figures.push_back(sums.named[i].second);
  }
  if (of_figures.empty()) return;
  const at::Tensor all = at::stack(of_figures);
  tensor_group->all_reduce(all, ReduceOp::kSum, "sums of figures");
  for (std::size_t i = first, next = 0; i < sums.named.size(); ++i) {
    at::Tensor& value = sums.named[i].second;
    if (value.dim() == 0) value = all[static_cast<std::int64_t>(next++)];
  }
}

LossSums cross_entropy_sums(const at::Tensor& logits_BTV, const at::Tensor& targets_BT,
                            const at::Tensor& mask_BT, double label_smoothing) {
  constexpr std::int64_t kIgnored = -100;  // no token id is negative
  const at::ScalarType precision =
      logits_BTV.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor ignored_N = mask_BT.reshape(-1).eq(0);
  LossSums sums;
  sums.count = ignored_N.logical_not().sum(at::kDouble);
  if (logits_BTV.is_cuda()) {
    const auto sum_and_nats = FusedCrossEntropy::apply(
        logits_BTV.flatten(0, 1).contiguous(), targets_BT.reshape(-1).contiguous(),
        mask_BT.reshape(-1).contiguous(), label_smoothing);
    sums.loss = sum_and_nats[0];
    sums.nats_N = sum_and_nats[1];
    sums.nats = sums.nats_N.sum(at::kDouble);
    return sums;
  }
  const at::Tensor targets_N = targets_BT.reshape(-1).masked_fill(ignored_N, kIgnored);
  const at::Tensor log_probabilities_NV =
      at::log_softmax(logits_BTV.flatten(0, 1), /*dim=*/-1, precision);
  const at::Tensor nats_N =
      at::nll_loss(log_probabilities_NV, targets_N, /*weight=*/{}, at::Reduction::None, kIgnored);
  sums.loss = nats_N.sum();
  sums.nats_N = nats_N.detach();
  sums.nats = sums.nats_N.sum(at::kDouble);
  if (label_smoothing > 0) {
    sums.loss = (1 - label_smoothing) * sums.loss -
                label_smoothing * log_probabilities_NV.mean(1).masked_fill(ignored_N, 0).sum();
  }
  return sums;
}

}  // namespace birkhoff
