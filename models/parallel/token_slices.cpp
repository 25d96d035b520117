#include "models/parallel/token_slices.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "cluster/base/tensors/rounded_linear.h"
#include "cluster/base/tensors/second_gradient.h"
#include "models/parallel/saved_group.h"

namespace birkhoff {
namespace {

// What the exchanges of rows between the ranks of a tensor axis are for: the inputs of products,
// other rows, and sums.
constexpr char kProductRows[] = "tokens of products", kGatheredRows[] = "tokens",
               kSummedRows[] = "sums of tokens";

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor all_gather_rows(ProcessGroup& group, const at::Tensor& x_nC, const char* name) {
  at::Tensor x_NC = at::empty({group.size() * x_nC.size(0), x_nC.size(1)}, x_nC.options());
  group.all_gather(x_NC, x_nC.contiguous(), name);
  return x_NC;
}

// A sum of the rows of all ranks, and its slice, which is defined once the work is done.
struct PendingSum {
  at::Tensor x_NC, slice_nC;
  std::unique_ptr<Work> work;
};
PendingSum start_sum(ProcessGroup& group, const at::Tensor& x_NC) {
  PendingSum sum{x_NC.contiguous(), {}, nullptr};
  sum.slice_nC = at::empty({x_NC.size(0) / group.size(), x_NC.size(1)}, x_NC.options());
  sum.work = group.reduce_scatter_async(sum.slice_nC, sum.x_NC, ReduceOp::kSum, kSummedRows);
  return sum;
}
at::Tensor sum_rows(ProcessGroup& group, const at::Tensor& x_NC) {
  PendingSum sum = start_sum(group, x_NC);
  sum.work->wait();
  return sum.slice_nC;
}

// all_gather_rows(), whose backward pass is sum_rows(), or with `gathers` false the reverse.
template <bool gathers>
struct ExchangeRows : torch::autograd::Function<ExchangeRows<gathers>> {
  static at::Tensor exchange(bool gather, ProcessGroup& group, const at::Tensor& x) {
    return gather ? all_gather_rows(group, x, kGatheredRows) : sum_rows(group, x);
  }
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, ProcessGroup* group) {
    save_group(context, group);
    return exchange(gathers, *group, x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    return {exchange(!gathers, *saved_group(context), gradients[0]), at::Tensor()};
  }
};

// Returns y [N, O] and x [N, C]. The rows of x behind the last token are gathered, too. `bias`:
// none or one.
struct GatherLinear : torch::autograd::Function<GatherLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x_nC,
                               const at::Tensor& weight_OC, at::TensorList bias_O,
                               ProcessGroup* group) {
    save_group(context, group);
    context->set_materialize_grads(false);  // x_NC may be unused
    const at::Tensor rounded_OC = weight_OC.to(x_nC.scalar_type());
    context->save_for_backward({x_nC, rounded_OC});
    context->saved_data["dtype"] = weight_OC.scalar_type();
    context->saved_data["bias"] = !bias_O.empty();
    const at::Tensor x_NC = all_gather_rows(*group, x_nC, kProductRows);
    const auto bias =
        bias_O.empty() ? std::nullopt : std::optional(bias_O[0].to(x_nC.scalar_type()));
    return {at::linear(x_NC, rounded_OC, bias), x_NC};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    require(gradients[0].defined(), "a linear layer's outputs are used");
    ProcessGroup& group = *saved_group(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x_nC = saved[0], &weight_OC = saved[1], &d_y_NO = gradients[0];
    at::Tensor x_NC = at::empty({group.size() * x_nC.size(0), x_nC.size(1)}, x_nC.options());
    const at::Tensor mine_nC = x_nC.contiguous();
    const auto gather = group.all_gather_async(x_NC, mine_nC, kProductRows);
    at::Tensor d_x_NC = at::matmul(d_y_NO, weight_OC);
    if (gradients[1].defined()) d_x_NC.add_(gradients[1]);
    gather->wait();
    const PendingSum sum = start_sum(group, d_x_NC);
    const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
    variable_list result{sum.slice_nC, weight_gradient(d_y_NO, x_NC, dtype)};
    if (context->saved_data["bias"].toBool()) result.push_back(bias_gradient(d_y_NO, dtype));
    result.emplace_back();  // none for `group`
    sum.work->wait();
    return result;
  }
};

}  // namespace

TokenSlices::TokenSlices(const ModelPlacement& place, std::int64_t batch, std::int64_t tokens)
    : group_(place.tensor),
      batch_(batch),
      tokens_(tokens),
      slice_((batch * tokens + place.tensor_size - 1) / place.tensor_size) {}

at::Tensor TokenSlices::mine(const at::Tensor& x_BTC) const {
  if (!divided()) return x_BTC;
  const std::int64_t past = batch_ * tokens_;
  const std::int64_t first = std::min(past, group_->rank() * slice_),
                     size = std::min(past, first + slice_) - first;
  const at::Tensor rows = x_BTC.flatten(0, 1).narrow(0, first, size);
  if (size == slice_) return rows;
  std::vector<std::int64_t> padding(static_cast<std::size_t>(2 * rows.dim()), 0);
  padding.back() = slice_ - size;  // behind dimension 0
  return at::constant_pad_nd(rows, padding);
}

at::Tensor TokenSlices::of_tokens(const at::Tensor& x_NC) const {
  const std::int64_t tokens = batch_ * tokens_;
  // The backward pass of narrow() fills and copies a tensor.
  const at::Tensor rows = x_NC.size(0) == tokens ? x_NC : x_NC.narrow(0, 0, tokens);
  return rows.unflatten(0, {batch_, tokens_});
}

at::Tensor TokenSlices::gather(const at::Tensor& x_nC) const {
  if (!divided() || !x_nC.defined()) return x_nC;
  return of_tokens(ExchangeRows<true>::apply(x_nC, group_));
}

at::Tensor TokenSlices::sum(const at::Tensor& part_BTC) const {
  if (!divided()) return part_BTC;
  at::Tensor rows_NC = part_BTC.flatten(0, 1);
  if (const std::int64_t missing = group_->size() * slice_ - rows_NC.size(0); missing > 0) {
    rows_NC = at::constant_pad_nd(rows_NC, {0, 0, 0, missing});
  }
  return ExchangeRows<false>::apply(rows_NC, group_);
}

TokenSlices::Product TokenSlices::gather_linear(const at::Tensor& x_nC, const at::Tensor& weight_OC,
                                                const at::Tensor& bias_O) const {
  if (!divided()) return {rounded_linear(x_nC, weight_OC, bias_O), x_nC};
  const at::TensorList bias = bias_O.defined() ? at::TensorList(bias_O) : at::TensorList();
  const variable_list products = GatherLinear::apply(x_nC, weight_OC, bias, group_);
  return {of_tokens(products[0]), of_tokens(products[1])};
}

at::Tensor TokenSlices::drop(const at::Tensor& x_nC, float p, const NoiseKey& key,
                             NoisePurpose purpose) const {
  if (!divided()) return philox_dropout(x_nC, p, key, purpose);
  return philox_dropout(
      x_nC, p, key, purpose,
      {.rows = tokens_, .columns = x_nC.size(1), .first_row = group_->rank() * slice_});
}

at::Tensor TokenSlices::drop_columns(const at::Tensor& x_BTc, std::int64_t columns, float p,
                                     const NoiseKey& key, NoisePurpose purpose) const {
  if (!divided()) return philox_dropout(x_BTc, p, key, purpose);
  const Interval mine = partition(columns, group_->rank(), group_->size());
  return philox_dropout(x_BTc, p, key, purpose,
                        {.rows = tokens_, .columns = columns, .first_column = mine.begin});
}

at::Tensor TokenSlices::drop_tokens(const at::Tensor& x_nC, float p, const NoiseKey& key) const {
  if (p == 0) return x_nC;
  const std::int64_t tokens = divided() ? tokens_ : x_nC.size(1);
  const at::Tensor dropped_BT = philox_uniform(key, NoisePurpose::kTokenDropout, {tokens}).le(p);
  return x_nC.masked_fill(mine(dropped_BT).unsqueeze(-1), 0);
}

}  // namespace birkhoff
