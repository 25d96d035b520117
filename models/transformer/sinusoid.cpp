#include "models/transformer/sinusoid.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

namespace birkhoff {

at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels) {
  at::Tensor table_TC = at::zeros({positions, channels}, at::kDouble);
  auto table = table_TC.accessor<double, 2>();
  const std::int64_t half = channels / 2;
  const double step = std::log(1e4) / static_cast<double>(std::max<std::int64_t>(half - 1, 1));
  for (std::int64_t t = 0; t < positions; ++t) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) * std::exp(-step * static_cast<double>(i));
      table[t][i] = std::sin(angle);
      table[t][half + i] = std::cos(angle);
    }
  }
  return table_TC;
}

}  // namespace birkhoff
