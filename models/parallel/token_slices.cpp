#include "models/parallel/token_slices.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "cluster/base/interval.h"
#include "cluster/base/tensors/rounded_linear.h"
#include "cluster/base/tensors/second_gradient.h"
#include "models/parallel/deferred_gradients.h"
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

// The rows of all ranks, which are defined once the work is done, and this rank's.
struct PendingRows {
  at::Tensor x_NC, mine_nC;
  std::unique_ptr<Work> work;
};
PendingRows start_gather(ProcessGroup& group, const at::Tensor& x_nC, const char* name) {
  PendingRows rows{at::empty({group.size() * x_nC.size(0), x_nC.size(1)}, x_nC.options()),
                   x_nC.contiguous(), nullptr};
  rows.work = group.all_gather_async(rows.x_NC, rows.mine_nC, name);
  return rows;
}

at::Tensor rows(const at::Tensor& x_NC, const Interval& range) {
  return x_NC.narrow(0, range.begin, range.size());
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

// The gradients of sum_rows()'s inputs. Deferred gradients are computed in the meantime.
at::Tensor gather_gradients(ProcessGroup& group, const at::Tensor& d_y_nC) {
  const PendingRows gathered = start_gather(group, d_y_nC, kGatheredRows);
  compute_deferred_gradients();
  gathered.work->wait();
  return gathered.x_NC;
}

// all_gather_rows(), whose backward pass is sum_rows().
struct GatherRows : torch::autograd::Function<GatherRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_nC, ProcessGroup* group) {
    save_group(context, group);
    return all_gather_rows(*group, x_nC, kGatheredRows);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    return {sum_rows(*saved_group(context), gradients[0]), at::Tensor()};
  }
};

// sum_rows(), whose backward pass gathers.
struct SumRows : torch::autograd::Function<SumRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_NC, ProcessGroup* group) {
    save_group(context, group);
    return sum_rows(*group, x_NC);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    return {gather_gradients(*saved_group(context), gradients[0]), at::Tensor()};
  }
};

void require_gradient(const at::Tensor& x) {
  require(x.requires_grad(), "without a gradient of its input, a product has no backward pass");
}
void defer_weight_gradient(const at::Tensor& weight_OI, const at::Tensor& d_y_NO,
                           const at::Tensor& x_NI) {
  defer_gradient(weight_OI, [d_y_NO, x_NI, dtype = weight_OI.scalar_type()] {
    return weight_gradient(d_y_NO, x_NI, dtype);
  });
}

// y = x weight^T + bias, for some rows at a time. bias: may be undefined.
struct RowProduct {
  at::Tensor weight_OI, bias_O;

  at::Tensor output(std::int64_t num_rows) const {
    return at::empty({num_rows, weight_OI.size(0)}, weight_OI.options());
  }
  void compute(at::Tensor y_nO, const at::Tensor& x_nI) const {
    if (bias_O.defined()) {
      at::addmm_out(y_nO, bias_O, x_nI, weight_OI.t());
    } else {
      at::mm_out(y_nO, x_nI, weight_OI.t());
    }
  }
};

// In both products below a rank computes its own rows while those of other ranks are on their way.

// Returns y [N, O] and x [N, C]. The rows of x behind the last token are gathered, too.
// seen: the weight unless its gradient is deferred, and the bias if there is one. Autograd does not
// see the weight through a pointer.
struct GatherLinear : torch::autograd::Function<GatherLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x_nC,
                               const at::Tensor* weight_OC, at::TensorList seen, bool defers,
                               ProcessGroup* group) {
    save_group(context, group);
    context->set_materialize_grads(false);  // x_NC may be unused
    const at::Tensor rounded_OC = weight_OC->to(x_nC.scalar_type());
    context->save_for_backward({x_nC, rounded_OC, *weight_OC});
    const bool has_bias = seen.size() > (defers ? 0 : 1);
    context->saved_data["defers"] = defers;
    context->saved_data["bias"] = has_bias;
    const RowProduct product{rounded_OC,
                             has_bias ? seen.back().to(x_nC.scalar_type()) : at::Tensor()};
    const PendingRows x = start_gather(*group, x_nC, kProductRows);
    const std::int64_t num_mine = x_nC.size(0);
    const Interval mine{group->rank() * num_mine, (group->rank() + 1) * num_mine};
    at::Tensor y_NO = product.output(x.x_NC.size(0));
    product.compute(rows(y_NO, mine), x.mine_nC);
    x.work->wait();
    // The other ranks' rows.
    for (const Interval& range : {Interval{0, mine.begin}, Interval{mine.end, y_NO.size(0)}}) {
      product.compute(rows(y_NO, range), rows(x.x_NC, range));
    }
    return {y_NO, x.x_NC};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    require(gradients[0].defined(), "a linear layer's outputs are used");
    ProcessGroup& group = *saved_group(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x_nC = saved[0], &weight_OC = saved[1], &d_y_NO = gradients[0];
    const PendingRows gathered = start_gather(group, x_nC, kProductRows);
    const at::Tensor& x_NC = gathered.x_NC;
    const at::Tensor d_x_NC = gradients[1].defined() ? at::addmm(gradients[1], d_y_NO, weight_OC)
                                                     : at::mm(d_y_NO, weight_OC);
    gathered.work->wait();
    const PendingSum sum = start_sum(group, d_x_NC);
    compute_deferred_gradients();
    const at::Tensor& parameter = saved[2];
    const at::ScalarType dtype = parameter.scalar_type();
    variable_list result{sum.slice_nC, {}};  // none for the pointer
    if (context->saved_data["defers"].toBool()) {
      defer_weight_gradient(parameter, d_y_NO, x_NC);
    } else {
      result.push_back(weight_gradient(d_y_NO, x_NC, dtype));
    }
    if (context->saved_data["bias"].toBool()) result.push_back(bias_gradient(d_y_NO, dtype));
    result.resize(result.size() + 2);  // none for `defers` and `group`
    sum.work->wait();
    return result;
  }
};

// The slice [n, O] of the sum over ranks of x [B, T, I] weight^T, which is filled up to num_rows.
struct LinearSum : torch::autograd::Function<LinearSum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_BTI,
                            const at::Tensor* weight_OI, ProcessGroup* group,
                            std::int64_t num_rows) {
    save_group(context, group);
    const at::Tensor x_NI = x_BTI.flatten(0, 1);
    const at::Tensor rounded_OI = weight_OI->to(x_BTI.scalar_type());
    context->save_for_backward({x_NI, rounded_OI, *weight_OI});
    context->saved_data["tokens"] = x_BTI.size(1);
    const RowProduct product{rounded_OI, {}};
    const std::int64_t num_tokens = x_NI.size(0), num_mine = num_rows / group->size(),
                       num_earlier = group->rank() * num_mine;
    const Interval mine{std::min(num_tokens, num_earlier),
                        std::min(num_tokens, num_earlier + num_mine)},
        after{mine.end, num_tokens};
    at::Tensor sent_NO = product.output(num_rows - num_mine);
    if (num_tokens < num_rows) sent_NO.zero_();
    product.compute(rows(sent_NO, {0, mine.begin}), rows(x_NI, {0, mine.begin}));
    product.compute(rows(sent_NO, {num_earlier, num_earlier + after.size()}), rows(x_NI, after));
    // Not a reduce_scatter: it would need this rank's own term, which is computed meanwhile.
    std::vector<std::int64_t> counts(static_cast<std::size_t>(group->size()),
                                     num_mine * sent_NO.size(1));
    counts[static_cast<std::size_t>(group->rank())] = 0;
    const at::Tensor received_NO = at::empty_like(sent_NO);
    const auto exchange = group->all_to_all_async(received_NO.view({-1}), counts,
                                                  sent_NO.view({-1}), counts, kSummedRows);
    at::Tensor sum_nO = product.output(num_mine);
    product.compute(rows(sum_nO, {0, mine.size()}), rows(x_NI, mine));
    rows(sum_nO, {mine.size(), num_mine}).zero_();
    exchange->wait();
    if (group->size() == 2) return sum_nO.add_(received_NO);
    // A sum in bf16 is rounded once, at the end.
    const at::ScalarType wide = at::toOpMathType(sum_nO.scalar_type());
    return sum_nO.add_(received_NO.unflatten(0, {-1, num_mine}).sum(0, /*keepdim=*/false, wide));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const at::Tensor d_filled_NO = gather_gradients(*saved_group(context), gradients[0]);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x_NI = saved[0];
    const at::Tensor d_y_NO = d_filled_NO.narrow(0, 0, x_NI.size(0));
    defer_weight_gradient(saved[2], d_y_NO, x_NI);
    const std::int64_t tokens = context->saved_data["tokens"].toInt();
    return {at::mm(d_y_NO, saved[1]).unflatten(0, {-1, tokens}), {}, {}, {}};
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
  return of_tokens(GatherRows::apply(x_nC, group_));
}

at::Tensor TokenSlices::sum(const at::Tensor& part_BTC) const {
  if (!divided()) return part_BTC;
  at::Tensor rows_NC = part_BTC.flatten(0, 1);
  if (const std::int64_t missing = group_->size() * slice_ - rows_NC.size(0); missing > 0) {
    rows_NC = at::constant_pad_nd(rows_NC, {0, 0, 0, missing});
  }
  return SumRows::apply(rows_NC, group_);
}

at::Tensor TokenSlices::linear_sum(const at::Tensor& x_BTI, const at::Tensor& weight_OI) const {
  require(divided(), "inputs are split between the ranks of a tensor axis");
  if (!c10::GradMode::is_enabled()) return sum(rounded_linear(x_BTI, weight_OI, {}));
  require_gradient(x_BTI);
  return LinearSum::apply(x_BTI, &weight_OI, group_, group_->size() * slice_);
}

TokenSlices::Product TokenSlices::gather_linear(const at::Tensor& x_nC, const at::Tensor& weight_OC,
                                                const at::Tensor& bias_O, bool used_once) const {
  if (!divided()) return {rounded_linear(x_nC, weight_OC, bias_O), x_nC};
  if (!c10::GradMode::is_enabled()) {
    // One product: those of decoding have few rows.
    const at::Tensor x_BTC = gather(x_nC);
    return {rounded_linear(x_BTC, weight_OC, bias_O), x_BTC};
  }
  require_gradient(x_nC);
  std::vector<at::Tensor> seen;
  if (!used_once) seen.push_back(weight_OC);
  if (bias_O.defined()) seen.push_back(bias_O);
  const variable_list products =
      GatherLinear::apply(x_nC, &weight_OC, at::TensorList(seen), used_once, group_);
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
