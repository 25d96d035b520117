// The tensors of one call of fused attention over gathered rows. Legend: B batch, H heads, L
// queries, P slots of a list, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// The softmax of each single slot, for the backward pass: out (on a GPU in q's dtype), and maximum
// and inverse sum (on a GPU the sum), in the dtype of sums. Undefined where the backward pass does
// not need them.
struct SlotResults {
  at::Tensor out_BHPD, softmax_2BHP;
};

struct GatheredResults {
  AttentionPart part;
  SlotResults slots;
};

struct GatheredGradients {
  at::Tensor d_q_BHLD, d_k_BHSD, d_v_BHSD;
  // Undefined without the operand.
  at::Tensor d_relative_keys_HRD{}, d_relative_values_HRD{}, d_sink_H{}, d_relative_bias_HR{};
};

}  // namespace birkhoff
