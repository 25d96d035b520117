#include "runtime/gradients/step_sums.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "runtime/gradients/shard_tree.h"

namespace birkhoff {
namespace {

// Columns of loss_sums_. The sums of figures follow.
enum Column : std::int64_t {
  kCount,   // counted targets
  kNats,    // their loss
  kTokens,  // tokens read
  kFigures,
};

at::Tensor sum_of_rows(const at::Tensor& rows) {
  if (rows.size(0) == 1) return rows[0];
  ShardSum sum(rows.size(0));
  for (std::int64_t row = 0; row < rows.size(0); ++row) sum.add({row, row + 1}, rows[row]);
  return sum.sums().front();
}

}  // namespace

StepSums::StepSums(Model& model, std::int64_t num_shards) : figures_(model.figures()) {
  const Parameters& parameters = model.parameters();
  std::int64_t num_columns = 0;
  for (const Statistic& statistic : parameters.statistics()) {
    const std::int64_t size = c10::multiply_integers(statistic.sums_shape);
    statistics_.push_back({statistic, num_columns, size});
    num_columns += size;
  }
  const std::int64_t num_rows = std::max<std::int64_t>(1, num_shards);
  const auto fp64 = at::TensorOptions(at::kDouble).device(parameters.device());
  loss_sums_ = at::zeros({num_rows, kFigures + figures_.num_columns()}, fp64);
  statistic_sums_ = at::zeros({num_rows, num_columns}, fp64.dtype(parameters.dtype()));
  not_finite_ = at::zeros({1}, fp64);
}

void StepSums::zero() {
  loss_sums_.zero_();
  statistic_sums_.zero_();
  not_finite_.zero_();
}

void StepSums::add(std::int64_t row, const LossSums& sums) {
  const at::Tensor loss_row = loss_sums_[row], statistic_row = statistic_sums_[row];
  loss_row[kCount] += sums.count;
  loss_row[kNats] += sums.nats;
  loss_row[kTokens] += sums.tokens.defined() ? sums.tokens : sums.count;
  not_finite_ += at::isfinite(sums.loss.detach()).logical_not();
  require(figures_.complete(sums.named) &&
              sums.named.size() ==
                  static_cast<std::size_t>(figures_.num_columns()) + statistics_.size(),
          "a training step has the sums of all figures and statistics, and no others");
  for (const auto& [name, value] : sums.named) {
    if (const std::int64_t column = figures_.column(name); column >= 0) {
      loss_row[kFigures + column] += value;
      continue;
    }
    const auto found = std::ranges::find_if(
        statistics_, [&](const StatisticColumns& s) { return s.statistic.name == name; });
    require(found != statistics_.end() && value.sizes() == found->statistic.sums_shape,
            "the sums of a statistic have its name and the declared shape");
    statistic_row.narrow(0, found->first, found->size) += value.flatten();
  }
}

StepSums::Total StepSums::total() const {
  const at::Tensor on_host = at::cat({not_finite_, sum_of_rows(loss_sums_)}).cpu();
  const double* sums = on_host.const_data_ptr<double>() + 1;
  Total total;
  total.finite = on_host.const_data_ptr<double>()[0] == 0;
  total.count = sums[kCount];
  total.nats = sums[kNats];
  total.tokens = sums[kTokens];
  total.figures = figures_.values(sums + kFigures, sums[kCount]);
  return total;
}

void StepSums::update_statistics(const at::Tensor& applies) {
  if (statistics_.empty()) return;
  const at::Tensor total = sum_of_rows(statistic_sums_);
  for (const auto& [statistic, first, size] : statistics_) {
    const at::Tensor next =
        statistic.update(statistic.value, total.narrow(0, first, size).view(statistic.sums_shape));
    statistic.value.copy_(at::where(applies, next, statistic.value));
  }
}

}  // namespace birkhoff
