#include "models/losses/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cluster/base/tensors/rounded_linear.h"
#include "cluster/base/tensors/second_gradient.h"
#include "models/losses/fused_cross_entropy.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows whose logits are computed together. On a CPU 2^26 logits are 256 MiB in fp32, and as much
// again for the log-softmax. Products of few rows do not fill a GPU.
std::int64_t rows_at_once(const at::Tensor& weight_VE) {
  const std::int64_t most = std::int64_t{1} << (weight_VE.is_cuda() ? 29 : 26);
  return std::max<std::int64_t>(1, most / weight_VE.size(0));
}

at::Tensor correct_of(const at::Tensor& logits_nV, const at::Tensor& targets_n) {
  return logits_nV.argmax(-1).eq(targets_n);
}

struct WithGradients : torch::autograd::Function<WithGradients> {
  // Returns the sum of the losses, the nats [N] and, if asked for, `correct` [N].
  static variable_list forward(AutogradContext* context, const at::Tensor& x_NE,
                               const at::Tensor& weight_VE, const at::Tensor& targets_N,
                               const at::Tensor& mask_N, double label_smoothing,
                               bool with_correct) {
    const std::int64_t N = x_NE.size(0), rows = rows_at_once(weight_VE);
    const auto precision = x_NE.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor losses_N = at::empty({N}, x_NE.options().dtype(precision)),
                     nats_N = at::empty_like(losses_N), d_x_NE = at::empty_like(x_NE);
    at::Tensor d_weight_VE;
    std::vector<at::Tensor> correct_n;
    for (std::int64_t begin = 0; begin < N; begin += rows) {
      const std::int64_t count = std::min(rows, N - begin);
      const at::Tensor x_nE = x_NE.narrow(0, begin, count),
                       targets_n = targets_N.narrow(0, begin, count),
                       logits_nV = at::linear(x_nE, weight_VE);
      if (with_correct) correct_n.push_back(correct_of(logits_nV, targets_n));
      const RowLosses losses = fused_cross_entropy_(
          logits_nV, targets_n, mask_N.narrow(0, begin, count), label_smoothing);
      losses_N.narrow(0, begin, count).copy_(losses.losses_N);
      nats_N.narrow(0, begin, count).copy_(losses.nats_N);
      d_x_NE.narrow(0, begin, count).copy_(logits_nV.mm(weight_VE));
      const bool is_all = count == N;  // nothing is added to it
      const at::Tensor part_VE =
          weight_gradient(logits_nV, x_nE, is_all ? x_nE.scalar_type() : precision);
      d_weight_VE = d_weight_VE.defined() ? d_weight_VE.add_(part_VE) : part_VE;
    }
    if (N == 0) d_weight_VE = at::zeros_like(weight_VE);
    context->saved_data["d_x"] = d_x_NE;
    context->saved_data["d_weight"] = d_weight_VE.to(weight_VE.scalar_type());
    variable_list results{losses_N.sum(), nats_N};
    if (with_correct) {
      results.push_back(N == 0 ? mask_N.ne(0) : at::cat(correct_n));
      context->mark_non_differentiable({results[1], results[2]});
    } else {
      context->mark_non_differentiable({nats_N});
    }
    return results;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const at::Tensor d_x_NE = context->saved_data["d_x"].toTensor(),
                     d_weight_VE = context->saved_data["d_weight"].toTensor();
    context->saved_data.clear();  // the last reference to each is then its user's
    scale_gradients_(d_x_NE, gradients[0]);
    scale_gradients_(d_weight_VE, gradients[0]);
    return {d_x_NE, d_weight_VE, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

LinearCrossEntropy linear_cross_entropy(const at::Tensor& x_NE, const at::Tensor& weight_VE,
                                        const at::Tensor& targets_N, const at::Tensor& mask_N,
                                        double label_smoothing, bool with_correct) {
  LinearCrossEntropy result;
  const bool with_gradients = c10::GradMode::is_enabled();
  // In fp16, gradients are rounded only after the loss scale has multiplied them.
  if (with_gradients && x_NE.scalar_type() != at::kHalf) {
    const variable_list outputs =
        WithGradients::apply(x_NE, weight_VE, targets_N, mask_N, label_smoothing, with_correct);
    result.sums.loss = outputs[0];
    result.sums.nats_N = outputs[1];
    result.sums.nats = outputs[1].sum(at::kDouble);
    result.sums.count = mask_N.ne(0).sum(at::kDouble);
    if (with_correct) result.correct_N = outputs[2];
    return result;
  }
  const std::int64_t N = x_NE.size(0),
                     rows = with_gradients ? std::max<std::int64_t>(1, N) : rows_at_once(weight_VE);
  std::vector<at::Tensor> correct_n, nats_n;
  for (std::int64_t begin = 0; begin == 0 || begin < N; begin += rows) {
    const std::int64_t count = std::min(rows, N - begin);
    const at::Tensor targets_n = targets_N.narrow(0, begin, count),
                     logits_nV = at::linear(x_NE.narrow(0, begin, count), weight_VE);
    if (with_correct) correct_n.push_back(correct_of(logits_nV, targets_n));
    const LossSums sums =
        cross_entropy_sums(logits_nV.unsqueeze(0), targets_n.unsqueeze(0),
                           mask_N.narrow(0, begin, count).unsqueeze(0), label_smoothing);
    nats_n.push_back(sums.nats_N);
    if (begin == 0) {
      result.sums = sums;
      continue;
    }
    result.sums.loss = result.sums.loss + sums.loss;
    result.sums.nats = result.sums.nats + sums.nats;
    result.sums.count = result.sums.count + sums.count;
  }
  result.sums.nats_N = at::cat(nats_n);
  if (with_correct) result.correct_N = at::cat(correct_n);
  return result;
}

}  // namespace birkhoff
