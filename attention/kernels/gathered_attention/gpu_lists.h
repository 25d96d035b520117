// The lists of slots that the GPU kernels of attention over gathered rows read. For both g++ and
// nvcc.
#pragma once

#include <cstdint>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// The key head of one of `heads`.
BIRKHOFF_DEVICE GpuHead key_head(const GatheredParams& p, GpuHead head, int heads) {
  return {head.b, head.h / (heads / p.key_heads)};
}

// The index of entry `at` of a head, in [B, heads, count].
BIRKHOFF_DEVICE std::int64_t entry_of(GpuHead head, int heads, int count, int at) {
  return (std::int64_t{head.b} * heads + head.h) * count + at;
}

// The lists of one key head.
struct GpuHeadLists {
  const GatheredListsParams& lists;
  GpuHead head;
  const std::int32_t *row_of, *ends, *order, *starts;
  int used;  // slots

  BIRKHOFF_DEVICE GpuHeadLists(const GatheredListsParams& new_lists, GpuHead new_head, int segments)
      : lists(new_lists), head(new_head) {
    const std::int64_t number =
        std::int64_t{lists.batch == 1 ? 0 : head.b} * lists.heads + (lists.heads == 1 ? 0 : head.h);
    row_of = lists.row_of + number * lists.slots;
    ends = lists.ends + number * segments;
    order = lists.order + number * lists.slots;
    starts = lists.starts + number * (lists.rows + 1);
    used = segments == 0 ? 0 : ends[segments - 1];
  }
  BIRKHOFF_DEVICE int first_of(int segment) const { return segment == 0 ? 0 : ends[segment - 1]; }
  BIRKHOFF_DEVICE int row(int slot) const { return row_of[slot]; }
  // The segment of a used slot: the first that ends after it. The warp searches: all its lanes call
  // this, with ballot(x), whose bit i is lane i's x. Each round loads from 32 segments at once and
  // leaves a 32nd of them.
  template <typename Ballot>
  BIRKHOFF_DEVICE int segment_of(int slot, int segments, int lane, Ballot ballot) const {
    int first = 0;  // no segment before it ends after the slot
    for (int step = 1, count = segments;; count = step) {
      step = (count + 31) / 32;
      const int last = first + (lane + 1) * step - 1;  // of the lane's part
      first += step * num_bits(ballot(last < segments && ends[last] <= slot));
      if (step <= 1) return first;
    }
  }
  // p of DistanceBand.
  BIRKHOFF_DEVICE std::int64_t p_of(bool by_rank, int segment, int slot) const {
    if (by_rank) return slot - first_of(segment);
    const int at = row(slot);
    return lists.positions == nullptr ? at
                                      : lists.positions[head.b * lists.position_strides[0] +
                                                        head.h * lists.position_strides[1] + at];
  }
};

// Where the results of the query at a slot go: the slot, or its row.
BIRKHOFF_DEVICE std::int64_t place_of_query(const GatheredParams& p, GpuHead head,
                                            const GpuHeadLists& queries, int slot) {
  return p.queries.once ? entry_of(head, p.heads, p.queries.rows, queries.row(slot))
                        : entry_of(head, p.heads, p.queries.slots, slot);
}
// The query's number for the distance of a key, of `numbers` [B, H, L, R] (DistanceParams).
BIRKHOFF_DEVICE float number_of_pair(const GatheredParams& p, const float* numbers, GpuHead head,
                                     int query_row, int key_row) {
  return numbers[entry_of(head, p.heads, p.queries.rows, query_row) * p.distances.rows +
                 p.distances.row_of(key_row - query_row)];
}

// The query at a slot, among the statistics of queries; of a mean, the slot.
BIRKHOFF_DEVICE std::int64_t statistics_of(const GatheredParams& p, GpuHead head,
                                           const GpuHeadLists& queries, int slot) {
  return p.mean ? entry_of(head, p.heads, p.queries.slots, slot)
                : entry_of(head, p.heads, p.queries.rows, queries.row(slot));
}
BIRKHOFF_DEVICE const float* maxima_of(const GatheredParams& p) {
  return p.mean ? p.slot_max : p.max;
}

// M, 1 / Z and delta of the query at a slot; of a mean, of the slot.
struct QueryStatistics {
  float M, inverse_Z, delta;
  BIRKHOFF_DEVICE QueryStatistics(const GatheredParams& p, GpuHead head,
                                  const GpuHeadLists& queries, int slot) {
    const std::int64_t at = statistics_of(p, head, queries, slot);
    M = maxima_of(p)[at];
    inverse_Z = p.inverse[at];
    delta = p.delta[at];
  }
};

}  // namespace birkhoff
