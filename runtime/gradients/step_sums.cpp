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
  kWeight,  // the sum of their weights
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
    statistics_.push_back({statistic.name, num_columns, size, &statistic});
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
  loss_row[kWeight] += sums.weight.defined() ? sums.weight : sums.count;
  loss_row[kNats] += sums.nats;
  loss_row[kTokens] += sums.tokens.defined() ? sums.tokens : sums.count;
  not_finite_ += at::isfinite(sums.loss.detach()).logical_not();
  if (columns_.empty()) find_columns(sums.named);
  require(sums.named.size() == columns_.size(), "a model returns the same sums each time");
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const auto& [name, value] = sums.named[i];
    const SumColumns& columns = columns_[i];
    require(name == columns.name, "a model returns its sums in the same order each time");
    if (columns.statistic == nullptr) {
      loss_row[columns.first] += value;
      continue;
    }
    require(value.sizes() == columns.statistic->sums_shape,
            "the sums of a statistic have the declared shape");
    statistic_row.narrow(0, columns.first, columns.size) += value.flatten();
  }
}

void StepSums::find_columns(const NamedSums& sums) {
  require(figures_.complete(sums) &&
              sums.size() == static_cast<std::size_t>(figures_.num_columns()) + statistics_.size(),
          "a training step has the sums of all figures and statistics, and no others");
  for (const auto& [name, value] : sums) {
    if (const std::int64_t column = figures_.column(name); column >= 0) {
      columns_.push_back({name, kFigures + column, 1});
      continue;
    }
    const auto found = std::ranges::find_if(
        statistics_, [&](const SumColumns& columns) { return columns.name == name; });
    require(found != statistics_.end(), "the sums of a statistic have its name");
    columns_.push_back(*found);
  }
}

StepSums::Total StepSums::total() const {
  const at::Tensor on_host = at::cat({not_finite_, sum_of_rows(loss_sums_)}).cpu();
  const double* sums = on_host.const_data_ptr<double>() + 1;
  Total total;
  total.finite = on_host.const_data_ptr<double>()[0] == 0;
  total.count = sums[kCount];
  total.weight = sums[kWeight];
  total.nats = sums[kNats];
  total.tokens = sums[kTokens];
  total.figures = figures_.values(sums + kFigures, sums[kCount]);
  return total;
}

void StepSums::update_statistics(const at::Tensor& applies) {
  if (statistics_.empty()) return;
  const at::Tensor total = sum_of_rows(statistic_sums_);
  for (const SumColumns& columns : statistics_) {
    const Statistic& statistic = *columns.statistic;
    const at::Tensor sums = total.narrow(0, columns.first, columns.size);
    const at::Tensor next = statistic.update(statistic.value, sums.view(statistic.sums_shape));
    statistic.value.copy_(at::where(applies, next, statistic.value));
  }
}

}  // namespace birkhoff
