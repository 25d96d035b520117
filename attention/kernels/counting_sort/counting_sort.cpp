#include "attention/kernels/counting_sort/counting_sort.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

SortedIndices new_groups(const at::Tensor& numbers_BHP, std::int64_t count) {
  return {at::empty(numbers_BHP.sizes(), numbers_BHP.options()),
          at::empty({numbers_BHP.size(0), numbers_BHP.size(1), count + 1}, numbers_BHP.options())};
}

// One head. A slot without a number has the number `count`.
void group_head(const std::int32_t* numbers, std::int64_t slots, std::int64_t used,
                std::int64_t count, std::int32_t* order, std::int32_t* starts,
                std::vector<std::int32_t>& next) {
  const auto number_of = [&](std::int64_t slot) {
    const bool has = slot < used && numbers[slot] >= 0 && numbers[slot] < count;
    return static_cast<std::size_t>(has ? numbers[slot] : count);
  };
  next.assign(static_cast<std::size_t>(count) + 2, 0);
  for (std::int64_t slot = 0; slot < slots; ++slot) ++next[number_of(slot) + 1];
  for (std::size_t n = 1; n < next.size(); ++n) next[n] += next[n - 1];
  std::copy(next.begin(), next.end() - 1, starts);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    order[next[number_of(slot)]++] = static_cast<std::int32_t>(slot);
  }
}

SortedIndices group_by_counting(const at::Tensor& numbers_BHP, std::int64_t count,
                                const at::Tensor& used_BH) {
  const std::int64_t P = numbers_BHP.size(2), heads = numbers_BHP.size(0) * numbers_BHP.size(1);
  SortedIndices groups = new_groups(numbers_BHP, count);
  const auto* used = used_BH.defined() ? used_BH.const_data_ptr<std::int32_t>() : nullptr;
  const auto* numbers = numbers_BHP.const_data_ptr<std::int32_t>();
  auto* order = groups.order_BHP.mutable_data_ptr<std::int32_t>();
  auto* starts = groups.starts_BHR.mutable_data_ptr<std::int32_t>();
  at::parallel_for(0, heads, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> next;
    for (std::int64_t head = begin; head < end; ++head) {
      group_head(numbers + head * P, P, used == nullptr ? P : used[head], count, order + head * P,
                 starts + head * (count + 1), next);
    }
  });
  return groups;
}

}  // namespace

at::Tensor count_numbers(const at::Tensor& numbers_BHP, std::int64_t count) {
  const at::Tensor index_BHP = numbers_BHP.to(at::kLong);
  return at::zeros({index_BHP.size(0), index_BHP.size(1), count}, index_BHP.options())
      .scatter_add(2, index_BHP, at::ones_like(index_BHP));
}

SortedIndices group_by_sorting(const at::Tensor& numbers_BHP, std::int64_t count,
                               const at::Tensor& used_BH) {
  at::Tensor none_BHP = at::logical_or(numbers_BHP < 0, numbers_BHP >= count);
  if (used_BH.defined()) {
    const at::Tensor slot_P = at::arange(numbers_BHP.size(2), numbers_BHP.options());
    none_BHP = at::logical_or(none_BHP, slot_P >= used_BH.unsqueeze(2));
  }
  const at::Tensor number_BHP = numbers_BHP.masked_fill(none_BHP, count),
                   count_BHR = count_numbers(number_BHP, count + 1);
  return {std::get<1>(at::sort(number_BHP, std::optional<bool>(true), /*dim=*/2)).to(at::kInt),
          (count_BHR.cumsum(2) - count_BHR).to(at::kInt)};
}

CountingSortParams counting_sort_params(const at::Tensor& numbers_BHP, std::int64_t count,
                                        const at::Tensor& used_BH, const SortedIndices& groups) {
  return {.heads = numbers_BHP.size(0) * numbers_BHP.size(1),
          .slots = static_cast<int>(numbers_BHP.size(2)),
          .count = static_cast<int>(count),
          .numbers = numbers_BHP.const_data_ptr<std::int32_t>(),
          .used = used_BH.defined() ? used_BH.const_data_ptr<std::int32_t>() : nullptr,
          .order = groups.order_BHP.mutable_data_ptr<std::int32_t>(),
          .starts = groups.starts_BHR.mutable_data_ptr<std::int32_t>()};
}

SortedIndices counting_sort(const at::Tensor& numbers, std::int64_t count, const at::Tensor& used) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
  require(numbers.scalar_type() == at::kInt && numbers.size(2) <= kMost && count <= kMost,
          "counting sort: numbers must be int32, and their slots and count fit it");
  const at::Tensor numbers_BHP = numbers.contiguous(),
                   used_BH = used.defined() ? used.contiguous() : used;
  if (numbers_BHP.is_cpu()) return group_by_counting(numbers_BHP, count, used_BH);
  if (!kHasGpuKernels || !numbers_BHP.is_cuda() || count > CountingSortParams::kMaxCount) {
    return group_by_sorting(numbers_BHP, count, used_BH);
  }
  const SortedIndices groups = new_groups(numbers_BHP, count);
  if constexpr (kHasGpuKernels) {
    launch_counting_sort(counting_sort_params(numbers_BHP, count, used_BH, groups),
                         current_stream(numbers_BHP));
  }
  return groups;
}

}  // namespace birkhoff
