// The segments of lists as tensors, padded to the longest, for the paths that use LibTorch's
// operations. Legend: B batch, H query heads, L queries, D head dim, G segments, M queries and N
// keys of the longest segment, P = G M slots.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// The rows of each segment, padded to the longest, which counts as at least one row.
struct PaddedSegments {
  at::Tensor rows_BHGM;    // int64; 0 in the padding
  at::Tensor slot_BHGM;    // int64: in the list; 0 in the padding
  at::Tensor exists_BHGM;  // bool: not padding

  // Lists of B samples and H heads, or shared by them. Waits for a GPU.
  PaddedSegments(const RowLists& lists, std::int64_t B, std::int64_t H);

  // Rows of x [B, H, num_rows, D] as [B, H, G, M, D]; zeros in the padding.
  at::Tensor gather(const at::Tensor& x_BHLD) const;
  // p of DistanceBand, broadcastable to [B, H, G, M].
  at::Tensor p_of(DistanceBand::Of of, const at::Tensor& positions_BHL) const;
  // The row of each slot [B, H, P]; `padding` in the padding.
  at::Tensor rows_or(std::int64_t padding) const;
};

// bool [B, H, G, M, N]: which queries see which keys.
at::Tensor visible_pairs(const GatheredAttention& in, const PaddedSegments& queries,
                         const PaddedSegments& keys);

// The same call with a key head, and lists, for each query head.
GatheredAttention with_keys_of_queries(GatheredAttention in);

// SlotMerge::kMean, from the outputs of slots, in the dtype of sums, and whether each sees a key.
// `q` is the call's.
AttentionPart mean_of_slots(const PaddedSegments& queries, const at::Tensor& out_BHPD,
                            const at::Tensor& sees_BHP, const at::Tensor& q_BHLD);

}  // namespace birkhoff
