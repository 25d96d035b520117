// A counting sort: slots grouped by the number of each. It inverts row lists, and lists the rows
// of each cluster or block. Legend: B batch, H heads, P slots, N numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/counting_sort/gpu_sort.h"

namespace birkhoff {

// int32. Number n has the slots order[starts[n]], .., order[starts[n + 1] - 1], in ascending
// order. The slots that have no number in [0, N) come last. R is N + 1.
struct SortedIndices {
  at::Tensor order_BHP, starts_BHR;
};

// numbers_BHP is int32; the slots from used_BH (int32) on, if it is defined, have no number. On a
// GPU asynchronous. The same result on every device and path.
SortedIndices counting_sort(const at::Tensor& numbers_BHP, std::int64_t count,
                            const at::Tensor& used_BH = {});
// Of each slot p, int32 [B, H, P]. Slots without a number count as slots of one more number.
struct SlotRanks {
  at::Tensor position_BHP;    // order[position] is p
  at::Tensor rank_BHP;        // how many earlier slots have p's number
  at::Tensor other_rank_BHP;  // how many slots up to p have the number others[p], less 1
};
struct RankedIndices {
  SortedIndices sorted;
  SlotRanks ranks;
};
// The same sort with ranks. others_BHP is int32; if undefined, so is other_rank_BHP.
RankedIndices ranked_counting_sort(const at::Tensor& numbers_BHP, std::int64_t count,
                                   const at::Tensor& others_BHP = {});

// The same by LibTorch's sort, which GPUs use for counts that do not fit their kernel. For tests.
SortedIndices group_by_sorting(const at::Tensor& numbers_BHP, std::int64_t count,
                               const at::Tensor& used_BH = {});
RankedIndices rank_by_sorting(const at::Tensor& numbers_BHP, std::int64_t count,
                              const at::Tensor& others_BHP = {});

// int64 [B, H, count]: the count of each number of [0, count) in numbers_BHP, which has no other
// numbers. On any device; asynchronous on a GPU.
at::Tensor count_numbers(const at::Tensor& numbers_BHP, std::int64_t count);

// Arguments of the kernel, which writes `groups`; for tests and counting_sort.cpp. All tensors are
// contiguous and must outlive the launch; `count` is at most CountingSortParams::kMaxCount. `ranks`
// are written if they are defined.
CountingSortParams counting_sort_params(const at::Tensor& numbers_BHP, std::int64_t count,
                                        const at::Tensor& used_BH, const SortedIndices& groups,
                                        const at::Tensor& others_BHP = {},
                                        const SlotRanks& ranks = {});

}  // namespace birkhoff
