// Legend: C channels, R rows of this rank, G ranks.
#include "models/point_cloud_transformer/batch_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "cluster/base/tensors/second_gradient.h"
#include "models/parallel/saved_group.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The rows of all ranks: their number [1], mean [C] and sum of squared deviations [C], in fp64.
struct Moments {
  at::Tensor count, mean_C, squares_C;
};

Moments moments_of(const at::Tensor& x_RC, ProcessGroup* group) {
  const std::int64_t R = x_RC.size(0), C = x_RC.size(1);
  const at::Tensor mean_C = x_RC.sum(0) / static_cast<double>(std::max<std::int64_t>(R, 1));
  const at::Tensor mine =
      at::cat({at::full({1}, static_cast<double>(R), x_RC.options().dtype(at::kDouble)),
               mean_C.to(at::kDouble), (x_RC - mean_C).square_().sum(0).to(at::kDouble)});
  const std::int64_t ranks = group == nullptr ? 1 : group->size();
  at::Tensor all = mine.unsqueeze(0);
  if (ranks > 1) {
    all = at::empty({ranks, 1 + 2 * C}, mine.options());
    group->all_gather(all, mine, "batch norm");
  }
  const at::Tensor count_G1 = all.narrow(1, 0, 1), mean_GC = all.narrow(1, 1, C);
  Moments moments;
  moments.count = count_G1.sum(0);
  moments.mean_C = (count_G1 * mean_GC).sum(0) / moments.count;
  moments.squares_C =
      (all.narrow(1, 1 + C, C) + count_G1 * (mean_GC - moments.mean_C).square()).sum(0);
  return moments;
}

struct NormalizeOverBatch : torch::autograd::Function<NormalizeOverBatch> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x_RC, double epsilon,
                               ProcessGroup* group) {
    const auto [count, mean_C, squares_C] = moments_of(x_RC, group);
    const at::Tensor inverse_C = (squares_C / count + epsilon).rsqrt().to(x_RC.scalar_type());
    const at::Tensor normal_RC = (x_RC - mean_C.to(x_RC.scalar_type())).mul_(inverse_C);
    const at::Tensor mean_variance_2C = at::stack({mean_C, squares_C / (count - 1).clamp_min(1)});
    context->save_for_backward({normal_RC, inverse_C, count});
    context->mark_non_differentiable({mean_variance_2C});
    save_group(context, group);
    return {normal_RC, mean_variance_2C};
  }

  // d_x = inverse (d - mean(d) - normal mean(d normal)), with means over all ranks.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &normal_RC = saved[0], &inverse_C = saved[1], &count = saved[2],
                     &d_RC = gradients[0];
    ProcessGroup* const group = saved_group(context);
    const at::Tensor sums_2C = at::stack({d_RC.sum(0), (d_RC * normal_RC).sum(0)}).to(at::kDouble);
    if (group != nullptr && group->size() > 1)
      group->all_reduce(sums_2C, ReduceOp::kSum, "gradient of batch norm");
    const at::Tensor means_2C = (sums_2C / count).to(normal_RC.scalar_type());
    const at::Tensor d_x_RC = (d_RC - means_2C[0]).sub_(normal_RC * means_2C[1]).mul_(inverse_C);
    return {d_x_RC, at::Tensor(), at::Tensor()};
  }
};

std::string describe_running(const at::Tensor& running_2C) {
  const at::Tensor values = running_2C.to(at::kCPU, at::kDouble);
  const auto of_row = [&](std::int64_t row, bool largest) {
    return (largest ? values[row].max() : values[row].min()).item<double>();
  };
  return fmt::format("  running means {:.4g} to {:.4g}, variances {:.4g} to {:.4g}\n",
                     of_row(0, false), of_row(0, true), of_row(1, false), of_row(1, true));
}

}  // namespace

NormalizedRows normalize_over_batch(const at::Tensor& x_RC, double epsilon, ProcessGroup* group) {
  const variable_list outputs = NormalizeOverBatch::apply(x_RC, epsilon, group);
  return {outputs[0], outputs[1]};
}

BatchNorm::BatchNorm(std::int64_t channels, double epsilon, double momentum,
                     const std::string& name, Parameters& parameters)
    : epsilon_(epsilon),
      name_(name + ".running"),
      group_(parameters.place().data),
      weight_C(parameters.add(name + ".weight", {channels}, Initializer::ones(), /*decay=*/false)),
      bias_C(parameters.add(name + ".bias", {channels}, Initializer::zeros(), /*decay=*/false)),
      running_2C(parameters.add_statistic(
          name_, {2, channels}, Initializer::zeros(), {2, channels},
          [momentum](const at::Tensor& value_2C, const at::Tensor& of_step_2C) {
            return value_2C + momentum * (of_step_2C - value_2C);
          },
          &describe_running)) {
  running_2C[1].fill_(1);
}

at::Tensor BatchNorm::operator()(const at::Tensor& x, bool training, NamedSums& sums) const {
  const at::Tensor x_RC = x.to(weight_C.scalar_type()).flatten(0, -2);
  at::Tensor normal_RC;
  if (training) {
    const auto [normal, mean_variance_2C] = normalize_over_batch(x_RC, epsilon_, group_);
    normal_RC = normal;
    // Ranks add their sums up, and all have the same.
    const bool counts = group_ == nullptr || group_->rank() == 0;
    sums.emplace_back(name_, counts ? mean_variance_2C : at::zeros_like(mean_variance_2C));
  } else {
    normal_RC = (x_RC - running_2C[0]) * (running_2C[1] + epsilon_).rsqrt();
  }
  return (normal_RC * weight_C + bias_C).view(x.sizes());
}

}  // namespace birkhoff
