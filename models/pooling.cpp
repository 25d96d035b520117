#include "models/pooling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <limits>

#include "cluster/base/error.h"

namespace birkhoff {

at::Tensor pool(Pooling pooling, const at::Tensor& x_BTC, const at::Tensor& lengths_B,
                at::ScalarType sum_dtype) {
  if (pooling == Pooling::kFirst) return x_BTC.select(1, 0);
  const at::Tensor padding_BT1 =
      at::arange(x_BTC.size(1), lengths_B.options()).ge(lengths_B.unsqueeze(1)).unsqueeze(-1);
  if (pooling == Pooling::kMax) {
    return x_BTC.masked_fill(padding_BT1, -std::numeric_limits<double>::infinity()).amax(1);
  }
  require(pooling == Pooling::kMean, "a pooling of the enum");
  const at::Tensor sum_BC = x_BTC.to(sum_dtype).masked_fill(padding_BT1, 0).sum(1);
  return (sum_BC / lengths_B.unsqueeze(1)).to(x_BTC.scalar_type());
}

}  // namespace birkhoff
