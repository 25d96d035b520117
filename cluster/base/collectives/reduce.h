// Elementwise reductions in a fixed order, for groups of host tensors.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

// output[i] = op over inputs[0][i], inputs[1][i], ... in this order, for `count` elements of type
// `dtype` (fp32, fp64, bf16, int64). bf16 accumulates in fp32 and is rounded once. max and min are
// NaN where any input is NaN. output may be one of the inputs.
void reduce_in_order(ReduceOp op, at::ScalarType dtype, std::span<const void* const> inputs,
                     void* output, std::int64_t count);

}  // namespace birkhoff
