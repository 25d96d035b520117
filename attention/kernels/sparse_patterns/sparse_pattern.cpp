#include "attention/kernels/sparse_patterns/sparse_pattern.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "attention/kernels/clusters/cluster_lists.h"

namespace birkhoff {
namespace {

// The rows of a list, segment by segment.
struct Segments {
  std::vector<std::int32_t> rows{}, ends{};

  // Adds rows first, first + step, .. below `end` to the last segment.
  void add(std::int64_t first, std::int64_t end, std::int64_t step = 1) {
    for (std::int64_t row = first; row < end; row += step) {
      rows.push_back(static_cast<std::int32_t>(row));
    }
  }
  void close() { ends.push_back(static_cast<std::int32_t>(rows.size())); }

  RowLists lists(std::int64_t num_rows, at::Device device) const {
    const auto tensor = [](const std::vector<std::int32_t>& values) {
      return at::tensor(values, at::kInt).view({1, 1, -1});
    };
    RowLists made = make_row_lists(tensor(rows), tensor(ends), num_rows, /*distinct=*/true);
    for (at::Tensor* each : {&made.rows_BHP, &made.ends_BHG, &made.order_BHP, &made.starts_BHR}) {
      *each = each->to(device);
    }
    return made;
  }
};

struct Lists {
  const SparsePattern& pattern;
  const std::int64_t L, stride = pattern.stride;
  const at::Device device;

  GatheredRows part(const Segments& queries, const Segments& keys, DistanceBand band = {}) const {
    if (pattern.causal) band.least = std::max<std::int64_t>(band.least, 0);
    return {queries.lists(L, device), keys.lists(L, device), band};
  }

  // The keys of each block that are no summaries, for its own queries; summaries for all queries.
  std::vector<GatheredRows> fixed() const {
    Segments blocks, others, sequence, summaries;
    for (std::int64_t first = 0; first < L; first += stride) {
      const std::int64_t end = std::min(first + stride, L),
                         first_summary = std::min(first + stride - pattern.summary, L);
      blocks.add(first, end);
      blocks.close();
      others.add(first, first_summary);
      others.close();
      summaries.add(first_summary, end);
    }
    sequence.add(0, L);
    sequence.close();
    summaries.close();
    std::vector<GatheredRows> parts;
    if (pattern.merged && !others.rows.empty()) parts.push_back(part(blocks, others));
    if (!pattern.merged || !summaries.rows.empty()) parts.push_back(part(sequence, summaries));
    return parts;
  }

  // Windows, and columns of tokens that are multiples of l apart.
  std::vector<GatheredRows> strided() const {
    constexpr std::int64_t kTile = 64;  // queries that the kernels take together
    const std::int64_t together = std::max(stride, kTile);
    Segments queries, near, columns;
    for (std::int64_t first = 0; first < L; first += together) {
      const std::int64_t end = std::min(first + together, L);
      queries.add(first, end);
      queries.close();
      near.add(std::max<std::int64_t>(first + 1 - stride, 0),
               pattern.causal ? end : std::min(end - 1 + stride, L));
      near.close();
    }
    for (std::int64_t first = 0; first < std::min(stride, L); ++first) {
      columns.add(first, L, stride);
      columns.close();
    }
    if (!pattern.merged) return {part(columns, columns)};
    std::vector<GatheredRows> parts{part(queries, near, {.least = 1 - stride, .most = stride - 1})};
    if (L <= stride) return parts;
    parts.push_back(part(columns, columns, {.least = stride}));
    if (!pattern.causal) parts.push_back(part(columns, columns, {.most = -stride}));
    return parts;
  }
};

}  // namespace

at::Tensor SparsePattern::sees(const at::Tensor& query, const at::Tensor& key) const {
  const at::Tensor distance = query - key;
  at::Tensor first, second;
  if (strided) {
    first = distance.abs() < stride;
    second = distance.remainder(stride) == 0;
  } else {
    first = at::div(query, stride, "floor") == at::div(key, stride, "floor");
    second = (key.remainder(stride) >= stride - summary).expand_as(distance);
  }
  const at::Tensor either = merged ? at::logical_or(first, second) : second;
  return causal ? at::logical_and(either, distance >= 0) : either;
}

std::int64_t SparsePattern::num_visible(std::int64_t i, std::int64_t L) const {
  const std::int64_t end = causal ? i + 1 : L;
  if (strided) {
    const std::int64_t multiples = i / stride + (end - 1 - i) / stride;
    const std::int64_t window =
        std::min(i + stride, end) - std::max<std::int64_t>(i + 1 - stride, 0);
    return multiples + (merged ? window : 1);
  }
  const auto summaries_before = [&](std::int64_t j) {
    return j / stride * summary + std::max<std::int64_t>(j % stride - stride + summary, 0);
  };
  if (!merged) return summaries_before(end);
  const std::int64_t first = i / stride * stride, last = std::min(first + stride, end);
  return summaries_before(end) + last - first - summaries_before(last) + summaries_before(first);
}

std::vector<GatheredRows> lists_of_pattern(const SparsePattern& pattern, std::int64_t L,
                                           at::Device device) {
  const Lists lists{.pattern = pattern, .L = L, .device = device};
  return pattern.strided ? lists.strided() : lists.fixed();
}

AttentionPart attend_in_pattern(std::vector<GatheredRows> lists, const GatheredAttention& in,
                                const Documents& documents, Path limit) {
  std::vector<AttentionPart> parts;
  for (GatheredRows& rows : lists) {
    hide_other_documents(documents, rows.band);
    GatheredAttention attention = in;
    attention.rows = std::move(rows);
    if (in.noise) {  // each part has a stream of its own
      const auto stream = static_cast<std::uint32_t>(parts.size()) << 29;
      attention.noise = in.noise->at_layer(in.noise->layer | stream);
    }
    parts.push_back(attend_gathered(attention, limit));
  }
  return parts.size() == 1 ? parts.front() : merge_parts(parts);
}

}  // namespace birkhoff
