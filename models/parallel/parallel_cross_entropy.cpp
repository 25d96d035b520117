// Legend: B batch, T tokens, N tokens of the batch, V vocabulary, v this rank's part of it, R
// ranks, P numbers that ranks exchange.
#include "models/parallel/parallel_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "cluster/base/interval.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

// The losses [N], and the nats [N], which have no gradient; 0 where `ignored`.
struct ParallelCrossEntropy : torch::autograd::Function<ParallelCrossEntropy> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& logits_Nv,
                                                const at::Tensor& targets_N,
                                                const at::Tensor& ignored_N,
                                                std::int64_t vocabulary, ProcessGroup* group,
                                                double label_smoothing) {
    const std::int64_t first_id = partition(vocabulary, group->rank(), group->size()).begin;
    const at::Tensor x_Nv =
        logits_Nv.to(logits_Nv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const std::int64_t v = x_Nv.size(1), N = x_Nv.size(0);
    // Targets of ignored tokens may be anything.
    const at::Tensor of_part_N = targets_N - first_id;
    const at::Tensor elsewhere_N =
        ignored_N.logical_or(of_part_N.lt(0)).logical_or(of_part_N.ge(v));
    const at::Tensor column_N1 = of_part_N.masked_fill(elsewhere_N, 0).unsqueeze(1);
    const at::Tensor max_N = x_Nv.amax(1);
    std::vector<at::Tensor> parts{max_N, (x_Nv - max_N.unsqueeze(1)).exp_().sum(1),
                                  x_Nv.gather(1, column_N1).squeeze(1).masked_fill(elsewhere_N, 0)};
    if (label_smoothing > 0) parts.push_back(x_Nv.sum(1));
    const at::Tensor mine_PN = at::stack(parts);
    at::Tensor all_RPN = at::empty({group->size(), mine_PN.size(0), N}, mine_PN.options());
    group->all_gather(all_RPN, mine_PN, "cross entropy");
    const at::Tensor max_RN = all_RPN.select(1, 0), most_N = max_RN.amax(0);
    const at::Tensor sum_N = (all_RPN.select(1, 1) * at::exp(max_RN - most_N)).sum(0);
    const at::Tensor log_sum_N = at::log(sum_N) + most_N;
    context->save_for_backward({logits_Nv, log_sum_N, column_N1, elsewhere_N, ignored_N});
    context->saved_data["label_smoothing"] = label_smoothing;
    context->saved_data["vocabulary"] = vocabulary;
    const at::Tensor nats_N = (log_sum_N - all_RPN.select(1, 2).sum(0)).masked_fill(ignored_N, 0);
    context->mark_non_differentiable({nats_N});
    if (label_smoothing == 0) return {nats_N.clone(), nats_N};
    const at::Tensor of_all_N =
        log_sum_N - all_RPN.select(1, 3).sum(0) / static_cast<double>(vocabulary);
    return {((1 - label_smoothing) * nats_N + label_smoothing * of_all_N).masked_fill(ignored_N, 0),
            nats_N};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    refuse_second_gradient();
    const auto saved = context->get_saved_variables();
    const at::Tensor &logits_Nv = saved[0], &column_N1 = saved[2], &elsewhere_N = saved[3];
    const at::Tensor log_sum_N1 = saved[1].unsqueeze(1);
    at::Tensor d_Nv = (logits_Nv.to(log_sum_N1.scalar_type()) - log_sum_N1).exp_();
    const double label_smoothing = context->saved_data["label_smoothing"].toDouble();
    if (label_smoothing > 0) {
      d_Nv.sub_(label_smoothing / context->saved_data["vocabulary"].toInt());
    }
    d_Nv.scatter_add_(
        1, column_N1,
        (elsewhere_N.logical_not().to(d_Nv.scalar_type()) * (label_smoothing - 1)).unsqueeze(1));
    d_Nv.mul_(gradients[0].masked_fill(saved[4], 0).unsqueeze(1));
    return {d_Nv.to(logits_Nv.scalar_type()),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

LossSums parallel_cross_entropy_sums(const at::Tensor& logits_BTv, const at::Tensor& targets_BT,
                                     const at::Tensor& mask_BT, std::int64_t vocabulary,
                                     ProcessGroup& group, double label_smoothing) {
  const at::Tensor ignored_N = mask_BT.reshape(-1).eq(0);
  const auto losses_and_nats =
      ParallelCrossEntropy::apply(logits_BTv.flatten(0, 1), targets_BT.reshape(-1), ignored_N,
                                  vocabulary, &group, label_smoothing);
  LossSums sums;
  sums.loss = losses_and_nats[0].sum();
  sums.nats_N = losses_and_nats[1];
  sums.nats = sums.nats_N.sum(at::kDouble);
  sums.count = ignored_N.logical_not().sum(at::kDouble);
  return sums;
}

at::Tensor parallel_likeliest_ids(const at::Tensor& logits_BTv, std::int64_t vocabulary,
                                  ProcessGroup& group) {
  // fp64 holds logits and ids exactly.
  const auto [most_BT, column_BT] = logits_BTv.detach().max(-1);
  const std::int64_t first_id = partition(vocabulary, group.rank(), group.size()).begin;
  const at::Tensor mine_2BT =
      at::stack({most_BT.to(at::kDouble), (column_BT + first_id).to(at::kDouble)});
  at::Tensor all_R2BT =
      at::empty({group.size(), 2, most_BT.size(0), most_BT.size(1)}, mine_2BT.options());
  group.all_gather(all_R2BT, mine_2BT, "likeliest ids");
  // Of equal logits argmax takes the first, which is that of the smallest id.
  const at::Tensor rank_1BT = all_R2BT.select(1, 0).argmax(0).unsqueeze(0);
  return all_R2BT.select(1, 1).gather(0, rank_1BT).squeeze(0).to(at::kLong);
}

at::Tensor gather_logits(const at::Tensor& logits_BTv, std::int64_t vocabulary,
                         ProcessGroup& group) {
  const std::int64_t widest = (vocabulary + group.size() - 1) / group.size();
  const at::Tensor mine =
      at::constant_pad_nd(logits_BTv.detach(), {0, widest - logits_BTv.size(2)});
  at::Tensor all = at::empty({group.size(), mine.size(0), mine.size(1), widest}, mine.options());
  group.all_gather(all, mine.contiguous(), "logits");
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) {
    parts.push_back(all[rank].narrow(2, 0, partition(vocabulary, rank, group.size()).size()));
  }
  return at::cat(parts, 2);
}

}  // namespace birkhoff
