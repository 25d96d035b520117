#include "attention/kernels/gathered_attention/cpu_slots.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_vector.h"
#include "attention/kernels/common/limits.h"
#include "attention/kernels/gathered_attention/cpu_lists.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {
namespace {

// The slots of one row.
struct Slots {
  const std::int32_t* data;
  std::int32_t count;

  const std::int32_t* begin() const { return data; }
  const std::int32_t* end() const { return data + count; }
};

// Calls work(head, row, slots) for each row of each head of x [B, H, L, D].
template <typename Work>
void for_each_row(const RowLists& lists, const at::Tensor& x_BHLD, const Work& work) {
  const std::int64_t H = x_BHLD.size(1), L = x_BHLD.size(2), D = x_BHLD.size(3),
                     list_heads = lists.rows_BHP.size(1);
  at::parallel_for(
      0, x_BHLD.size(0) * H * L, kWorthAThread / (16 * D) + 1,
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t first = begin; first < end;) {
          const Head head{first / L / H, first / L % H};
          const HeadLists of_head(lists, key_head(head, H, list_heads));
          const std::int64_t last = std::min(end, (first / L + 1) * L);
          for (; first < last; ++first) {
            const std::int32_t* starts = of_head.starts + first % L;
            work(head, first % L, Slots{of_head.order + starts[0], starts[1] - starts[0]});
          }
        }
      });
}

template <typename S>
struct SlotSums {
  RowPointers<const S> outs;
  Numbers<S> maxima, inverses;

  explicit SlotSums(const SlotResults& slots)
      : outs(slots.out_BHPD), maxima(slots.softmax_2BHP[0]), inverses(slots.softmax_2BHP[1]) {}

  const S* out(Head head, std::int32_t slot) const { return outs.at(head, slot); }
  bool sees(Head head, std::int32_t slot) const { return inverses.at(head, slot) != 0; }
  S max(Head head, std::int32_t slot) const { return maxima.at(head, slot); }
  // The slot's sum, for another maximum.
  S sum(Head head, std::int32_t slot, S max_of_all) const {
    if (!sees(head, slot)) return 0;
    return std::exp(max(head, slot) - max_of_all) / inverses.at(head, slot);
  }
};

// The part that is made.
template <typename T>
struct PartRows {
  RowPointers<T> out;
  Numbers<Sum<T>> max, sum;
  std::int64_t D;
  decltype(TileKernels<T>::write_rows) write_rows = tile_kernels<T>().write_rows;

  explicit PartRows(const AttentionPart& part)
      : out(part.out_BHLD), max(part.max_BHL), sum(part.sum_BHL), D(part.out_BHLD.size(3)) {}

  void set(Head head, std::int64_t row, const Sum<T>* out_D, Sum<T> row_max, Sum<T> row_sum) const {
    write_rows(out_D, 1, static_cast<int>(D), {out.at(head, row), D});
    max.at(head, row) = row_max;
    sum.at(head, row) = row_sum;
  }
};

template <typename T>
void merge_row(const SlotSums<Sum<T>>& sums, Head head, std::int64_t row, Slots slots,
               const PartRows<T>& part) {
  using S = Sum<T>;
  S max = -std::numeric_limits<S>::infinity();
  for (const std::int32_t slot : slots) {
    if (sums.sees(head, slot)) max = std::max(max, sums.max(head, slot));
  }
  S sum = 0, merged[kMaxTileHeadDim];
  std::fill_n(merged, part.D, S{0});
  for (const std::int32_t slot : slots) {
    const S weight = sums.sum(head, slot, max);
    const S* out = sums.out(head, slot);
    sum += weight;
    for (std::int64_t d = 0; d < part.D; ++d) merged[d] += weight * out[d];
  }
  for (std::int64_t d = 0; d < part.D; ++d) merged[d] /= sum != 0 ? sum : 1;
  part.set(head, row, slots.count == 1 ? sums.out(head, slots.data[0]) : merged, sum > 0 ? max : 0,
           sum);
}

template <typename T>
void average_row(const SlotSums<Sum<T>>& sums, Head head, std::int64_t row, Slots slots,
                 const PartRows<T>& part) {
  using S = Sum<T>;
  S count = 0, mean[kMaxTileHeadDim];
  std::fill_n(mean, part.D, S{0});
  for (const std::int32_t slot : slots) {
    if (!sums.sees(head, slot)) continue;
    const S* out = sums.out(head, slot);
    count += 1;
    for (std::int64_t d = 0; d < part.D; ++d) mean[d] += out[d];
  }
  for (std::int64_t d = 0; d < part.D; ++d) mean[d] /= count != 0 ? count : 1;
  part.set(head, row, mean, 0, count);
}

// Adds to the rest of each slot the deltas of all other slots, one by one, so that nothing
// cancels.
template <typename T>
void add_others(const SlotSums<Sum<T>>& sums, Sum<T> max, Sum<T> sum, const T* d_out,
                std::int64_t head_dim, Head head, Slots slots, const Numbers<Sum<T>>& rest) {
  using S = Sum<T>;
  const auto delta = [&](std::int32_t slot) {
    return sums.sum(head, slot, max) / (sum != 0 ? sum : 1) *
           dot_product(d_out, sums.out(head, slot), head_dim);
  };
  constexpr std::int32_t kFew = 16;
  S few[kFew];
  std::vector<S> many(slots.count > kFew ? static_cast<std::size_t>(slots.count) : 0);
  S* const deltas = slots.count > kFew ? many.data() : few;
  for (std::int32_t n = 0; n < slots.count; ++n) deltas[n] = delta(slots.data[n]);
  S before = 0, after = 0;
  for (std::int32_t n = 0; n < slots.count; ++n) {
    const std::int32_t last = slots.count - 1 - n;
    rest.at(head, slots.data[n]) += before;
    rest.at(head, slots.data[last]) += after;
    before += deltas[n];
    after += deltas[last];
  }
}

}  // namespace

AttentionPart merge_slots(const GatheredAttention& in, const SlotResults& slots) {
  const at::Tensor& q = in.q_BHLD;
  const at::TensorOptions options = slots.softmax_2BHP.options();
  const AttentionPart part{at::empty_like(q), at::empty({q.size(0), q.size(1), q.size(2)}, options),
                           at::empty({q.size(0), q.size(1), q.size(2)}, options)};
  dispatch_tile_type(q.scalar_type(), [&]<typename T>(T) {
    const SlotSums<Sum<T>> sums(slots);
    const PartRows<T> rows(part);
    for_each_row(in.rows.queries, q, [&](Head head, std::int64_t row, Slots of_row) {
      if (in.merge == SlotMerge::kMean) {
        average_row<T>(sums, head, row, of_row, rows);
      } else {
        merge_row<T>(sums, head, row, of_row, rows);
      }
    });
  });
  return part;
}

at::Tensor rests_of_slots(const GatheredAttention& in, const GatheredResults& results,
                          const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL) {
  const at::Tensor& q = in.q_BHLD;
  const at::Tensor rest_BHP = at::empty({q.size(0), q.size(1), in.rows.queries.rows_BHP.size(2)},
                                        results.part.sum_BHL.options());
  dispatch_tile_type(q.scalar_type(), [&]<typename T>(T) {
    using S = Sum<T>;
    const std::int64_t D = q.size(3);
    const std::optional<SlotSums<S>> sums =
        results.slots.out_BHPD.defined() ? std::optional<SlotSums<S>>(results.slots) : std::nullopt;
    const RowPointers<const T> d_out(d_out_BHLD);
    const Numbers<S> rest(rest_BHP), d_sum(d_sum_BHL), max(results.part.max_BHL),
        sum(results.part.sum_BHL);
    for_each_row(in.rows.queries, q, [&](Head head, std::int64_t row, Slots slots) {
      if (in.merge == SlotMerge::kMean) {
        const S count = sum.at(head, row);
        for (const std::int32_t slot : slots) {
          rest.at(head, slot) = count > 1 ? (1 - 1 / count) * dot_product(d_out.at(head, row),
                                                                          sums->out(head, slot), D)
                                          : 0;
        }
        return;
      }
      const S d_lse = d_sum.data ? d_sum.at(head, row) * sum.at(head, row) : S{0};
      for (const std::int32_t slot : slots) rest.at(head, slot) = -d_lse;
      if (slots.count < 2) return;
      add_others<T>(*sums, max.at(head, row), sum.at(head, row), d_out.at(head, row), D, head,
                    slots, rest);
    });
  });
  return rest_BHP;
}

at::Tensor add_slots(const RowLists& lists, const at::Tensor& x_BHPD, const at::Tensor& like_BHLD) {
  const at::Tensor result = at::empty_like(like_BHLD);
  dispatch_tile_type(result.scalar_type(), [&]<typename T>(T) {
    using S = Sum<T>;
    const std::int64_t D = result.size(3);
    const RowPointers<const S> of_slots(x_BHPD);
    const RowPointers<T> of_rows(result);
    const auto write_rows = tile_kernels<T>().write_rows;
    for_each_row(lists, result, [&](Head head, std::int64_t row, Slots slots) {
      S sums[kMaxTileHeadDim];
      std::fill_n(sums, D, S{0});
      for (const std::int32_t slot : slots) {
        const S* x = of_slots.at(head, slot);
        for (std::int64_t d = 0; d < D; ++d) sums[d] += x[d];
      }
      write_rows(sums, 1, static_cast<int>(D), {of_rows.at(head, row), D});
    });
  });
  return result;
}

}  // namespace birkhoff
