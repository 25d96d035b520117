// The named sums that a model's figures need, as columns of a table of sums.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cluster/base/tensors/named_sums.h"
#include "runtime/reporting/reports.h"

namespace birkhoff {

class FigureSums {
 public:
  explicit FigureSums(std::vector<Figure> figures);

  std::int64_t num_columns() const { return static_cast<std::int64_t>(names_.size()); }
  // The column of a named sum; -1: no figure needs it.
  std::int64_t column(std::string_view name) const;
  // Whether `sums` hold the sum of every column.
  bool complete(const NamedSums& sums) const;
  // The figures of summed columns [num_columns()], with `count` counted targets. A figure per 0 is
  // NaN.
  FigureValues values(const double* columns, double count) const;

 private:
  const std::vector<Figure> figures_;
  std::vector<std::string> names_;  // of the columns
};

}  // namespace birkhoff
