// The sums of a training step besides gradients, over its micro-batches and ranks: targets, losses,
// the sums of metrics, and the sums that update statistics.
//
// Each virtual shard has its own row, which one rank fills and all other ranks leave zero; the rows
// are added along the same tree as the shards' gradients. Without virtual shards there is one row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/model.h"
#include "runtime/reporting/figure_sums.h"

namespace birkhoff {

class StepSums {
 public:
  // num_shards: 0: no virtual shards. The model must outlive the sums.
  StepSums(Model& model, std::int64_t num_shards);

  void zero();
  // Adds a micro-batch's sums to a row. Does not wait for the device.
  void add(std::int64_t row, const LossSums& sums);
  // The tensors that ranks add up before total() and update_statistics().
  std::vector<at::Tensor> tensors() const { return {loss_sums_, statistic_sums_}; }

  // Sums over the rows, on the host.
  struct Total {
    double count = 0, weight = 0, nats = 0, tokens = 0;  // as in LossSums
    FigureValues figures;
    bool finite = true;  // this rank's losses
  };
  // Waits for the device.
  Total total() const;
  // Gives each statistic its next value where `applies`, a 0-dim bool tensor on the device, is
  // true. Does not wait for the device.
  void update_statistics(const at::Tensor& applies);

 private:
  // Where a named sum is added: in columns of statistic_sums_, or without a statistic in a column
  // of loss_sums_.
  struct SumColumns {
    std::string name;
    std::int64_t first = 0, size = 0;
    const Statistic* statistic = nullptr;
  };
  // Sets columns_ for sums in this order, in which a model returns them each time.
  void find_columns(const NamedSums& sums);

  std::vector<SumColumns> statistics_;
  std::vector<SumColumns> columns_;  // of each named sum; empty before the first
  const FigureSums figures_;
  at::Tensor loss_sums_;       // fp64 [rows, columns] on the device
  at::Tensor statistic_sums_;  // [rows, columns] of the parameters' dtype
  at::Tensor not_finite_;      // fp64 [1]: the number of this rank's non-finite losses
};

}  // namespace birkhoff
