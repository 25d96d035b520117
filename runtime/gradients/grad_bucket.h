// One bucket of parameters and their gradients (runtime/gradients/grad_buckets.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/interval.h"
#include "cluster/base/tensors/placement.h"

namespace birkhoff {

struct GradBucket {
  // Slots start at multiples of this many elements: at least a cache line and the widest vector.
  static constexpr std::int64_t kAlignment = 64;

  // The slot of one parameter.
  struct Slot {
    std::string name;
    bool decay = true;  // as in Parameter
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0, elements = 0;  // in the bucket
    TensorPlacement placement{};            // as in Parameter
  };

  std::int64_t elements() const { return values.size(0); }

  int number = 0;  // among the buckets

  // 1-D, of equal length, a multiple of kAlignment * ranks; the padding between slots is zero. The
  // parameters and their gradients are views of them. With ZeRO stage 3 values have memory only
  // while they are used, and with stages 2 and 3 gradients only during the backward pass.
  at::Tensor values, gradients;
  // The elements whose reduced gradients this rank has and whose values it updates: its slice with
  // ZeRO, else all.
  Interval owned{};
  // These elements, always in memory: views of values and gradients if those are.
  at::Tensor own_values, own_gradients;
  std::vector<Slot> slots;
  bool divided = false;  // each rank of the tensor axis has other elements
};

}  // namespace birkhoff
