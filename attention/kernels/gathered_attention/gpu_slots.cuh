// Merging of the results of slots into results of rows, and the backward pass's values of rows:
// kernels of gpu_gathered.cu, whose banner has the formulas. For that file only.
#pragma once

#include <math.h>

#include "attention/kernels/common/gpu_row_team.cuh"
#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/gpu_tiles.cuh"
#include "cluster/base/gpu/elements.cuh"

namespace birkhoff {
namespace {

// The row that a team owns, of a tensor [B, heads, rows, D].
struct TeamRow : TeamNumber {
  GpuHead head, of_keys;
  int row;

  __device__ TeamRow(const GatheredParams& p, int heads, int rows)
      : TeamNumber(static_cast<unsigned>(p.batch * heads) * static_cast<unsigned>(rows)) {
    const int of_all = number / rows;
    row = number - of_all * rows;
    head = {of_all / heads, of_all % heads};
    of_keys = key_head(p, head, heads);
  }
  template <typename T>
  __device__ T* of(const RowsParams& x) const {
    return row_of<T>(x, head, row);
  }
};

// The slots of a row, in ascending order.
struct SlotsOfRow {
  const std::int32_t* order;
  int begin, end;
  std::int64_t first;  // of the head, in [B, heads, P]

  __device__ SlotsOfRow(const GatheredParams& p, const GatheredListsParams& lists,
                        const TeamRow& own, int heads) {
    const GpuHeadLists of_head(lists, own.of_keys, p.segments);
    order = of_head.order;
    begin = of_head.starts[own.row];
    end = of_head.starts[own.row + 1];
    first = entry_of(own.head, heads, lists.slots, 0);
  }
  // Calls use(slot) for each; the next slot is loaded early.
  template <typename Use>
  __device__ void visit(Use use) const {
    int next = begin < end ? order[begin] : 0;
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
      const int slot = next;
      next = n + 1 < end ? order[n + 1] : 0;
      use(slot);
    }
  }
};

// sums += weight times a run of elements.
template <typename T>
__device__ inline void add_run(float (&sums)[kTeamColumns], float weight, const T* numbers,
                               int first, int head_dim) {
  float x[kTeamColumns];
  load_run(numbers, first, head_dim, x);
#pragma unroll
  for (int c = 0; c < kTeamColumns; ++c) sums[c] += weight * x[c];
}

// The sum of the products of two rows over `columns`; each lane of the team has it.
template <typename A, typename B>
__device__ inline float row_product(const TeamRow& own, const A* a, const B* b, int columns) {
  float sum = 0;
  visit_runs(own.member, columns, [&](int first) {
    float x[kTeamColumns], y[kTeamColumns];
    load_run(a, first, columns, x);
    load_run(b, first, columns, y);
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) sum += x[c] * y[c];
  });
  return lane_sum<kRowTeam>(sum);
}

// One softmax, merged from the slots' softmaxes.
template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 4) merge_kernel(const GatheredParams p) {
  const TeamRow own(p, p.heads, p.queries.rows);
  if (!own.exists) return;
  const SlotsOfRow slots(p, p.queries, own, p.heads);
  float M = -INFINITY, Z = 0;
  const float *const slot_sum = p.slot_sum + slots.first, *const slot_max =
                                                              p.slot_max + slots.first;
  slots.visit([&](int slot) {
    if (slot_sum[slot] != 0) M = fmaxf(M, slot_max[slot]);
  });
  const auto weight_of = [&](int slot) {
    return slot_sum[slot] == 0 ? 0.0f : slot_sum[slot] * expf(slot_max[slot] - M);
  };
  slots.visit([&](int slot) { Z += weight_of(slot); });
  visit_runs(own.member, p.head_dim, [&](int first) {
    float out[kTeamColumns] = {};
    slots.visit([&](int slot) {
      const float weight = weight_of(slot);
      if (weight == 0) return;  // sees no key
      add_run(out, weight, row_of<const T>(p.slot_out, own.head, slot), first, p.head_dim);
    });
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) out[c] = Z == 0 ? 0.0f : out[c] / Z;
    store_run(own.of<T>(p.out), first, p.head_dim, out);
  });
  if (own.member == 0) {
    p.max[own.number] = Z > 0 ? M : 0.0f;
    p.sum[own.number] = Z;
  }
}

// The mean of the slots that see a key.
template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 4) average_kernel(const GatheredParams p) {
  const TeamRow own(p, p.heads, p.queries.rows);
  if (!own.exists) return;
  const SlotsOfRow slots(p, p.queries, own, p.heads);
  float count = 0;
  slots.visit([&](int slot) { count += p.slot_sum[slots.first + slot] != 0 ? 1 : 0; });
  visit_runs(own.member, p.head_dim, [&](int first) {
    float out[kTeamColumns] = {};
    slots.visit([&](int slot) {  // slots that see no key add 0
      add_run(out, 1, row_of<const T>(p.slot_out, own.head, slot), first, p.head_dim);
    });
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) out[c] = count == 0 ? 0.0f : out[c] / count;
    store_run(own.of<T>(p.out), first, p.head_dim, out);
  });
  if (own.member == 0) {
    p.max[own.number] = 0;
    p.sum[own.number] = count;
  }
}

template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 4) delta_kernel(const GatheredParams p) {
  const TeamRow own(p, p.heads, p.queries.rows);
  float delta = row_product(own, own.of<T>(p.d_out), own.of<T>(p.out), p.head_dim);
  if (p.d_sum != nullptr) delta -= p.d_sum[own.number] * p.sum[own.number];
  if (own.exists && own.member == 0) {
    p.delta[own.number] = delta;
    p.inverse[own.number] = p.sum[own.number] == 0 ? 0.0f : 1 / p.sum[own.number];
  }
}

// delta of the slots of a mean, and the query's term of the sink's gradient.
template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 4) mean_delta_kernel(const GatheredParams p) {
  const TeamRow own(p, p.heads, p.queries.rows);
  const SlotsOfRow slots(p, p.queries, own, p.heads);
  // All teams of a warp visit the same number of slots: the sums need all of its lanes.
  int most = slots.end - slots.begin;
#pragma unroll
  for (int distance = kRowTeam; distance < kWarp; distance *= 2) {
    most = max(most, __shfl_xor_sync(kWholeWarp, most, distance));
  }
  const T* d_out = own.of<T>(p.d_out);
  float d_sink = 0;
#pragma unroll 1
  for (int n = 0; n < most; ++n) {
    const bool has = slots.begin + n < slots.end;
    const int number = has ? slots.order[slots.begin + n] : 0;
    const std::int64_t slot = slots.first + number;
    const float delta = row_product(own, d_out, row_of<const T>(p.slot_out, own.head, number),
                                    has ? p.head_dim : 0);
    const bool sees_keys = has && p.slot_sum[slot] != 0;
    const float inverse = sees_keys ? 1 / (p.slot_sum[slot] * p.sum[own.number]) : 0.0f;
    if (own.exists && has && own.member == 0) {
      p.delta[slot] = delta;
      p.inverse[slot] = inverse;
    }
    if (p.sink == nullptr || !sees_keys) continue;
    d_sink -= expf(p.sink[own.head.h] - p.slot_max[slot]) * inverse * delta;
  }
  if (p.sink != nullptr && own.exists && own.member == 0) p.d_sink[own.number] = d_sink;
}

// The sums of the slots of each row of a tensor of `heads` heads.
template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 4)
    add_kernel(const GatheredParams p, const int heads, const GatheredListsParams lists,
               const RowsParams numbers, const int columns, const RowsParams sums) {
  const TeamRow own(p, heads, lists.rows);
  if (!own.exists) return;
  const SlotsOfRow slots(p, lists, own, heads);
  visit_runs(own.member, columns, [&](int first) {
    float sum[kTeamColumns] = {};
    slots.visit([&](int slot) {
      add_run(sum, 1, row_of<const T>(numbers, own.head, slot), first, columns);
    });
    store_run(own.of<T>(sums), first, columns, sum);
  });
}

}  // namespace
}  // namespace birkhoff
