#include "tests/attention/kernels/gathered_attention/position_lists.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// Segments in the making.
struct Segments {
  std::vector<std::int32_t> rows, ends;

  // Adds rows first, first + step, .. below `end` to the last segment.
  void add(std::int64_t first, std::int64_t end, std::int64_t step = 1) {
    for (std::int64_t row = first; row < end; row += step) {
      rows.push_back(static_cast<std::int32_t>(row));
    }
  }
  void close() { ends.push_back(static_cast<std::int32_t>(rows.size())); }

  RowLists lists(std::int64_t num_rows, at::Device device) const {
    const auto tensor = [&](const std::vector<std::int32_t>& numbers) {
      return at::tensor(numbers, at::kInt).view({1, 1, -1});
    };
    RowLists made = make_row_lists(tensor(rows), tensor(ends), num_rows);  // checked on the CPU
    for (at::Tensor* each : {&made.rows_BHP, &made.ends_BHG, &made.order_BHP, &made.starts_BHR}) {
      *each = each->to(device);
    }
    return made;
  }
};

}  // namespace

GatheredRows sliding_window_lists(std::int64_t num_tokens, std::int64_t width, bool causal,
                                  at::Device device) {
  require(width >= 1, "sliding_window_lists: width");
  constexpr std::int64_t kTogether = 64;  // queries: a tile of the kernels
  Segments queries, keys;
  for (std::int64_t first = 0; first < num_tokens; first += kTogether) {
    const std::int64_t end = std::min(first + kTogether, num_tokens);
    queries.add(first, end);
    queries.close();
    keys.add(std::max<std::int64_t>(first - (width - 1), 0),
             causal ? end : std::min(end + width - 1, num_tokens));
    keys.close();
  }
  return {queries.lists(num_tokens, device),
          keys.lists(num_tokens, device),
          {.least = causal ? 0 : 1 - width, .most = width - 1}};
}

GatheredRows strided_lists(std::int64_t num_tokens, std::int64_t stride, at::Device device) {
  require(stride >= 1, "strided_lists: stride");
  Segments columns;
  for (std::int64_t first = 0; first < std::min(stride, num_tokens); ++first) {
    columns.add(first, num_tokens, stride);
    columns.close();
  }
  const RowLists lists = columns.lists(num_tokens, device);
  return {lists, lists, {.least = stride}};
}

GatheredRows listed_blocks(std::int64_t num_tokens, std::int64_t block,
                           const std::vector<std::vector<std::int64_t>>& keys_of, bool causal,
                           at::Device device) {
  require(block >= 1, "listed_blocks: block");
  const auto end_of = [&](std::int64_t n) { return std::min((n + 1) * block, num_tokens); };
  Segments queries, keys;
  for (std::int64_t n = 0; n * block < num_tokens; ++n) {
    queries.add(n * block, end_of(n));
    queries.close();
    for (const std::int64_t m : keys_of.at(static_cast<std::size_t>(n))) {
      require(m >= 0 && m * block < num_tokens, "listed_blocks: number of a block");
      keys.add(m * block, end_of(m));
    }
    keys.close();
  }
  DistanceBand band;
  if (causal) band.least = 0;
  return {queries.lists(num_tokens, device), keys.lists(num_tokens, device), band};
}

}  // namespace birkhoff
