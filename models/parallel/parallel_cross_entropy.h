// Cross entropy of logits whose vocabulary is divided over a tensor-parallel group (Shoeybi et al.
// 2019, "Megatron-LM", section 3): for each token, ranks exchange three numbers, with label
// smoothing four, and no logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cluster/base/collectives/process_group.h"
#include "models/losses/loss_sums.h"

namespace birkhoff {

// cross_entropy_sums() of the logits of all ranks, the same on each. logits_BTv: those of this
// rank's partition of the ids, which has at least one. The backward pass is local. Collective over
// the group.
LossSums parallel_cross_entropy_sums(const at::Tensor& logits_BTv, const at::Tensor& targets_BT,
                                     const at::Tensor& mask_BT, std::int64_t vocabulary,
                                     ProcessGroup& group, double label_smoothing = 0);

// The id with the largest logit of each token, int64 [B, T]; of equal ones the smallest. Without
// gradients; arguments as above. Collective over the group.
at::Tensor parallel_likeliest_ids(const at::Tensor& logits_BTv, std::int64_t vocabulary,
                                  ProcessGroup& group);

// The logits [B, T, V] of all V ids, without gradients, from those of each rank's partition of
// them. Collective over the group.
at::Tensor gather_logits(const at::Tensor& logits_BTv, std::int64_t vocabulary,
                         ProcessGroup& group);

}  // namespace birkhoff
