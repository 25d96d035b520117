#include "attention/kernels/gathered_attention/cpu_places.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_vector.h"
#include "attention/kernels/common/limits.h"
#include "attention/kernels/gathered_attention/cpu_lists.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {
namespace {

// The places of one row.
struct Places {
  const std::int32_t* data;
  std::int32_t count;

  const std::int32_t* begin() const { return data; }
  const std::int32_t* end() const { return data + count; }
};

// Calls work(head, row, places) for each row of each head of x [B, H, L, D].
template <typename Work>
void for_each_row(const RowLists& lists, const at::Tensor& x_BHLD, const Work& work) {
  const std::int64_t H = x_BHLD.size(1), L = x_BHLD.size(2), D = x_BHLD.size(3),
                     list_heads = lists.rows_BHP.size(1);
  at::parallel_for(0, x_BHLD.size(0) * H * L, kWorthAThread / (16 * D) + 1,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t r = begin; r < end; ++r) {
                       const Head head{r / L / H, r / L % H};
                       const HeadLists of_head(lists, key_head(head, H, list_heads));
                       const std::int32_t* starts = of_head.starts + r % L;
                       work(head, r % L, Places{of_head.order + starts[0], starts[1] - starts[0]});
                     }
                   });
}

template <typename S>
struct PlaceSums {
  at::Tensor out_BHPD, max_BHP, inverse_BHP;

  explicit PlaceSums(const PlaceResults& places)
      : out_BHPD(places.out_BHPD),
        max_BHP(places.softmax_2BHP[0]),
        inverse_BHP(places.softmax_2BHP[1]) {}

  const S* out(Head head, std::int32_t place) const { return row_of<S>(out_BHPD, head, place); }
  bool sees(Head head, std::int32_t place) const {
    return *number_of<S>(inverse_BHP, head, place) != 0;
  }
  S max(Head head, std::int32_t place) const { return *number_of<S>(max_BHP, head, place); }
  // The place's sum, for another maximum.
  S sum(Head head, std::int32_t place, S max_of_all) const {
    if (!sees(head, place)) return 0;
    return std::exp(max(head, place) - max_of_all) / *number_of<S>(inverse_BHP, head, place);
  }
};

template <typename T>
void merge_row(const PlaceSums<Sum<T>>& sums, Head head, std::int64_t row, Places places,
               const AttentionPart& part) {
  using S = Sum<T>;
  const std::int64_t D = part.out_BHLD.size(3);
  S max = -std::numeric_limits<S>::infinity();
  for (const std::int32_t place : places) {
    if (sums.sees(head, place)) max = std::max(max, sums.max(head, place));
  }
  S sum = 0, merged[kMostTileHeadDim] = {};
  for (const std::int32_t place : places) {
    const S weight = sums.sum(head, place, max);
    const S* out = sums.out(head, place);
    sum += weight;
    for (std::int64_t d = 0; d < D; ++d) merged[d] += weight * out[d];
  }
  for (std::int64_t d = 0; d < D; ++d) merged[d] /= sum != 0 ? sum : 1;
  const S* out = places.count == 1 ? sums.out(head, places.data[0]) : merged;
  tile_kernels<T>().write_rows(out, 1, static_cast<int>(D),
                               {mutable_row_of<T>(part.out_BHLD, head, row), D});
  *number_of<S>(part.max_BHL, head, row) = sum > 0 ? max : 0;
  *number_of<S>(part.sum_BHL, head, row) = sum;
}

template <typename T>
void average_row(const PlaceSums<Sum<T>>& sums, Head head, std::int64_t row, Places places,
                 const AttentionPart& part) {
  using S = Sum<T>;
  const std::int64_t D = part.out_BHLD.size(3);
  S count = 0, mean[kMostTileHeadDim] = {};
  for (const std::int32_t place : places) {
    if (!sums.sees(head, place)) continue;
    const S* out = sums.out(head, place);
    count += 1;
    for (std::int64_t d = 0; d < D; ++d) mean[d] += out[d];
  }
  for (std::int64_t d = 0; d < D; ++d) mean[d] /= count != 0 ? count : 1;
  tile_kernels<T>().write_rows(mean, 1, static_cast<int>(D),
                               {mutable_row_of<T>(part.out_BHLD, head, row), D});
  *number_of<S>(part.max_BHL, head, row) = 0;
  *number_of<S>(part.sum_BHL, head, row) = count;
}

template <typename T>
Sum<T> dot(const T* d_out, const Sum<T>* out, std::int64_t head_dim) {
  Sum<T> product = 0;
  for (std::int64_t d = 0; d < head_dim; ++d) product += to_sum(d_out[d]) * out[d];
  return product;
}

// Adds to the rest of each place the deltas of the others, each by itself, so that nothing cancels.
template <typename T>
void add_others(const PlaceSums<Sum<T>>& sums, const AttentionPart& part, const T* d_out, Head head,
                std::int64_t row, Places places, const at::Tensor& rest_BHP) {
  using S = Sum<T>;
  const std::int64_t D = sums.out_BHPD.size(3);
  const S max = *number_of<S>(part.max_BHL, head, row),
          sum = *number_of<S>(part.sum_BHL, head, row);
  std::vector<S> deltas;
  for (const std::int32_t place : places) {
    deltas.push_back(sums.sum(head, place, max) / (sum != 0 ? sum : 1) *
                     dot(d_out, sums.out(head, place), D));
  }
  S before = 0, after = 0;
  for (std::int32_t n = 0; n < places.count; ++n) {
    const std::int32_t last = places.count - 1 - n;
    *number_of<S>(rest_BHP, head, places.data[n]) += before;
    *number_of<S>(rest_BHP, head, places.data[last]) += after;
    before += deltas[static_cast<std::size_t>(n)];
    after += deltas[static_cast<std::size_t>(last)];
  }
}

}  // namespace

AttentionPart merge_places(const GatheredAttention& in, const PlaceResults& places) {
  const at::Tensor& q = in.q_BHLD;
  const at::TensorOptions options = places.softmax_2BHP.options();
  const AttentionPart part{at::empty_like(q), at::empty({q.size(0), q.size(1), q.size(2)}, options),
                           at::empty({q.size(0), q.size(1), q.size(2)}, options)};
  dispatch_tile_type(q.scalar_type(), [&]<typename T>(T) {
    const PlaceSums<Sum<T>> sums(places);
    for_each_row(in.rows.queries, q, [&](Head head, std::int64_t row, Places of_row) {
      if (in.merge == PlaceMerge::kMean) {
        average_row<T>(sums, head, row, of_row, part);
      } else {
        merge_row<T>(sums, head, row, of_row, part);
      }
    });
  });
  return part;
}

at::Tensor rests_of_places(const GatheredAttention& in, const GatheredResults& results,
                           const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL) {
  const at::Tensor& q = in.q_BHLD;
  const at::Tensor rest_BHP = at::empty({q.size(0), q.size(1), in.rows.queries.rows_BHP.size(2)},
                                        results.part.sum_BHL.options());
  dispatch_tile_type(q.scalar_type(), [&]<typename T>(T) {
    using S = Sum<T>;
    for_each_row(in.rows.queries, q, [&](Head head, std::int64_t row, Places places) {
      if (in.merge == PlaceMerge::kMean) {
        const PlaceSums<S> sums(results.places);
        const S count = *number_of<S>(results.part.sum_BHL, head, row);
        for (const std::int32_t place : places) {
          *number_of<S>(rest_BHP, head, place) =
              count > 1 ? (1 - 1 / count) * dot(row_of<T>(d_out_BHLD, head, row),
                                                sums.out(head, place), q.size(3))
                        : 0;
        }
        return;
      }
      const S d_lse = d_sum_BHL.defined() ? *number_of<S>(d_sum_BHL, head, row) *
                                                *number_of<S>(results.part.sum_BHL, head, row)
                                          : S{0};
      for (const std::int32_t place : places) *number_of<S>(rest_BHP, head, place) = -d_lse;
      if (places.count < 2) return;
      add_others<T>(PlaceSums<S>(results.places), results.part, row_of<T>(d_out_BHLD, head, row),
                    head, row, places, rest_BHP);
    });
  });
  return rest_BHP;
}

at::Tensor add_places(const RowLists& lists, const at::Tensor& x_BHPD,
                      const at::Tensor& like_BHLD) {
  const at::Tensor result = at::empty_like(like_BHLD);
  dispatch_tile_type(result.scalar_type(), [&]<typename T>(T) {
    using S = Sum<T>;
    const std::int64_t D = result.size(3);
    for_each_row(lists, result, [&](Head head, std::int64_t row, Places places) {
      S sums[kMostTileHeadDim] = {};
      for (const std::int32_t place : places) {
        const S* x = row_of<S>(x_BHPD, head, place);
        for (std::int64_t d = 0; d < D; ++d) sums[d] += x[d];
      }
      tile_kernels<T>().write_rows(sums, 1, static_cast<int>(D),
                                   {mutable_row_of<T>(result, head, row), D});
    });
  });
  return result;
}

}  // namespace birkhoff
