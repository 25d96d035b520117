#include "attention/kernels/gathered_attention/inverse_lists.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <optional>
#include <tuple>
#include <vector>

namespace birkhoff {

at::Tensor count_numbers(const at::Tensor& numbers_BHP, std::int64_t count) {
  const at::Tensor index_BHP = numbers_BHP.to(at::kLong);
  return at::zeros({index_BHP.size(0), index_BHP.size(1), count}, index_BHP.options())
      .scatter_add(2, index_BHP, at::ones_like(index_BHP));
}

void invert_by_sorting(RowLists& lists) {
  const at::Tensor &rows_BHP = lists.rows_BHP, &ends_BHG = lists.ends_BHG;
  const std::int64_t P = rows_BHP.size(2), G = ends_BHG.size(2);
  const at::Tensor used_BH1 =
      G > 0 ? ends_BHG.narrow(2, G - 1, 1)
            : at::zeros({rows_BHP.size(0), rows_BHP.size(1), 1}, ends_BHG.options());
  const at::Tensor unused_BHP = at::arange(P, ends_BHG.options()) >= used_BH1;
  // Places that are not used come last, as row num_rows.
  const at::Tensor row_BHP = rows_BHP.masked_fill(unused_BHP, lists.num_rows);
  lists.order_BHP =
      std::get<1>(at::sort(row_BHP, std::optional<bool>(true), /*dim=*/2)).to(at::kInt);
  const at::Tensor count_BHR = count_numbers(row_BHP, lists.num_rows + 1);
  lists.starts_BHR = (count_BHR.cumsum(2) - count_BHR).to(at::kInt);
}

void invert_by_counting(RowLists& lists) {
  const std::int64_t P = lists.rows_BHP.size(2), G = lists.ends_BHG.size(2), R = lists.num_rows + 1;
  lists.order_BHP = at::zeros_like(lists.rows_BHP);
  lists.starts_BHR =
      at::zeros({lists.rows_BHP.size(0), lists.rows_BHP.size(1), R}, lists.rows_BHP.options());
  const auto* rows = lists.rows_BHP.const_data_ptr<std::int32_t>();
  const auto* ends = lists.ends_BHG.const_data_ptr<std::int32_t>();
  auto* order = lists.order_BHP.mutable_data_ptr<std::int32_t>();
  auto* starts = lists.starts_BHR.mutable_data_ptr<std::int32_t>();
  at::parallel_for(0, lists.rows_BHP.size(0) * lists.rows_BHP.size(1), 1,
                   [&](std::int64_t begin, std::int64_t end) {
                     std::vector<std::int32_t> next;
                     for (std::int64_t head = begin; head < end; ++head) {
                       const std::int32_t* row = rows + head * P;
                       const std::int32_t used = G > 0 ? ends[head * G + G - 1] : 0;
                       std::int32_t* start = starts + head * R;
                       for (std::int32_t place = 0; place < used; ++place) ++start[row[place] + 1];
                       for (std::int64_t r = 1; r < R; ++r) start[r] += start[r - 1];
                       next.assign(start, start + R);
                       for (std::int32_t place = 0; place < used; ++place) {
                         order[head * P + next[static_cast<std::size_t>(row[place])]++] = place;
                       }
                     }
                   });
}

}  // namespace birkhoff
