// Merging of the results of slots into results of rows, on the CPU. Results of slots are sums
// (bf16: fp32) in the order of the lists. Each row reads its own slots, in ascending order, which
// the inverse list names, and is rounded once: no two threads write to the same memory, and no
// order depends on their number. Legend: B batch, H heads, L queries, P slots of a list, D head
// dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/gathered_attention/operands.h"

namespace birkhoff {

// The result of each query, merged from its slots' results as in.merge says; `out` is like q. With
// SlotMerge::kMean `sum` is the number of its slots that see a key, and `max` is 0.
AttentionPart merge_slots(const GatheredAttention& in, const SlotResults& slots);

// rest [B, H, P] of each slot (tile_attention/cpu_loop.h). With one softmax, it is the share of
// the query's other slots in its delta = sum_j p_ij d_p_ij, less d_sum sum, the gradient of its
// log-sum-exp. With the mean over n slots, whose p_ij are divided by n, it is the correction of
// the slot's own delta: (1 - 1 / n) d_out . out.
at::Tensor rests_of_slots(const GatheredAttention& in, const GatheredResults& results,
                          const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL);

// The sums of the slots of each row, like `like_BHLD`; 0 for rows that have none.
at::Tensor add_slots(const RowLists& lists, const at::Tensor& x_BHPD, const at::Tensor& like_BHLD);

}  // namespace birkhoff
