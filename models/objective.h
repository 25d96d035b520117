// Loss of a micro-batch as sums.
//
// Legend: B batch, T tokens, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/model.h"

namespace birkhoff {

// Cross entropy of logits [B, T, V] against targets [B, T] (int64), summed over the tokens whose
// mask [B, T] (u8) is not 0; targets of other tokens are never read. Log-softmax in fp32 (fp64 for
// fp64 logits), sums of nats and counts in fp64.
ObjectiveSums cross_entropy_sums(const at::Tensor& logits_BTV, const at::Tensor& targets_BT,
                                 const at::Tensor& mask_BT);

}  // namespace birkhoff
