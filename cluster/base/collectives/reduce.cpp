#include "cluster/base/collectives/reduce.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <type_traits>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

template <ReduceOp op, typename T>
T combine(T a, T b) {
  if constexpr (op == ReduceOp::kSum) return a + b;
  // `b != b`: a NaN on either side wins, in either order.
  if constexpr (op == ReduceOp::kMax) return b > a || b != b ? b : a;
  if constexpr (op == ReduceOp::kMin) return b < a || b != b ? b : a;
}

template <ReduceOp op, typename T>
void reduce(std::span<const void* const> inputs, void* output, std::int64_t count) {
  using Accumulator = std::conditional_t<std::is_same_v<T, c10::BFloat16>, float, T>;
  constexpr std::int64_t kBlock = 1024;  // the accumulators stay in the L1 cache
  Accumulator sums[kBlock];
  for (std::int64_t start = 0; start < count; start += kBlock) {
    const std::int64_t n = std::min(kBlock, count - start);
    const T* first = static_cast<const T*>(inputs[0]) + start;
    for (std::int64_t i = 0; i < n; ++i) sums[i] = static_cast<Accumulator>(first[i]);
    for (const void* input : inputs.subspan(1)) {
      const T* values = static_cast<const T*>(input) + start;
      for (std::int64_t i = 0; i < n; ++i) {
        sums[i] = combine<op>(sums[i], static_cast<Accumulator>(values[i]));
      }
    }
    T* out = static_cast<T*>(output) + start;
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(sums[i]);
  }
}

template <ReduceOp op>
void reduce_dtype(at::ScalarType dtype, std::span<const void* const> inputs, void* output,
                  std::int64_t count) {
  switch (dtype) {
    case at::kFloat:
      return reduce<op, float>(inputs, output, count);
    case at::kDouble:
      return reduce<op, double>(inputs, output, count);
    case at::kBFloat16:
      return reduce<op, c10::BFloat16>(inputs, output, count);
    case at::kLong:
      return reduce<op, std::int64_t>(inputs, output, count);
    default:
      require(false, "reduce: dtype must be fp32, fp64, bf16 or int64");
  }
}

}  // namespace

void reduce_in_order(ReduceOp op, at::ScalarType dtype, std::span<const void* const> inputs,
                     void* output, std::int64_t count) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_dtype<ReduceOp::kSum>(dtype, inputs, output, count);
    case ReduceOp::kMax:
      return reduce_dtype<ReduceOp::kMax>(dtype, inputs, output, count);
    case ReduceOp::kMin:
      return reduce_dtype<ReduceOp::kMin>(dtype, inputs, output, count);
  }
}

}  // namespace birkhoff
