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

SlotRanks new_ranks(const at::Tensor& numbers_BHP, const at::Tensor& others_BHP) {
  const auto ranks = [&] { return at::empty(numbers_BHP.sizes(), numbers_BHP.options()); };
  return {ranks(), ranks(), others_BHP.defined() ? ranks() : at::Tensor()};
}

// `x` of a head, or null.
const std::int32_t* of_head(const at::Tensor& x, std::int64_t head, std::int64_t size) {
  return x.defined() ? x.const_data_ptr<std::int32_t>() + head * size : nullptr;
}
std::int32_t* result_of_head(const at::Tensor& x, std::int64_t head, std::int64_t size) {
  return x.defined() ? x.mutable_data_ptr<std::int32_t>() + head * size : nullptr;
}

// Sorts the slots of one head. A slot without a number has the number `count`. `ranks` may be
// undefined.
void sort_head(const at::Tensor& numbers_BHP, std::int64_t count, const at::Tensor& used_BH,
               const at::Tensor& others_BHP, std::int64_t head, const SortedIndices& groups,
               const SlotRanks& ranks, std::vector<std::int32_t>& next) {
  const std::int64_t P = numbers_BHP.size(2);
  const std::int32_t *numbers = of_head(numbers_BHP, head, P),
                     *others = of_head(others_BHP, head, P);
  std::int32_t *order = result_of_head(groups.order_BHP, head, P),
               *starts = result_of_head(groups.starts_BHR, head, count + 1),
               *position = result_of_head(ranks.position_BHP, head, P),
               *rank = result_of_head(ranks.rank_BHP, head, P),
               *other_rank = result_of_head(ranks.other_rank_BHP, head, P);
  const std::int64_t used = used_BH.defined() ? *of_head(used_BH, head, 1) : P;
  const auto in_range = [&](std::int32_t number) {
    return static_cast<std::size_t>(number >= 0 && number < count ? number : count);
  };
  const auto number_of = [&](std::int64_t slot) {
    return slot < used ? in_range(numbers[slot]) : static_cast<std::size_t>(count);
  };
  next.assign(static_cast<std::size_t>(count) + 2, 0);
  for (std::int64_t slot = 0; slot < P; ++slot) ++next[number_of(slot) + 1];
  for (std::size_t n = 1; n < next.size(); ++n) next[n] += next[n - 1];
  std::copy(next.begin(), next.end() - 1, starts);
  for (std::int64_t slot = 0; slot < P; ++slot) {
    const std::size_t number = number_of(slot);
    const std::int32_t to = next[number]++;
    order[to] = static_cast<std::int32_t>(slot);
    if (position == nullptr) continue;
    position[slot] = to;
    rank[slot] = to - starts[number];
    if (others == nullptr) continue;
    const std::size_t other = in_range(others[slot]);
    other_rank[slot] = next[other] - starts[other] - 1;
  }
}

void sort_on_cpu(const at::Tensor& numbers_BHP, std::int64_t count, const at::Tensor& used_BH,
                 const at::Tensor& others_BHP, const SortedIndices& groups,
                 const SlotRanks& ranks) {
  const std::int64_t heads = numbers_BHP.size(0) * numbers_BHP.size(1);
  at::parallel_for(0, heads, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> next;
    for (std::int64_t head = begin; head < end; ++head) {
      sort_head(numbers_BHP, count, used_BH, others_BHP, head, groups, ranks, next);
    }
  });
}

bool has_kernel(const at::Tensor& numbers_BHP, std::int64_t count) {
  return numbers_BHP.is_cpu() ||
         (kHasGpuKernels && numbers_BHP.is_cuda() && count <= CountingSortParams::kMaxCount);
}

// Fills `groups`, and `ranks` if they are defined; all are contiguous.
void sort_by_kernel(const at::Tensor& numbers_BHP, std::int64_t count, const at::Tensor& used_BH,
                    const at::Tensor& others_BHP, const SortedIndices& groups,
                    const SlotRanks& ranks) {
  if (numbers_BHP.is_cpu()) {
    return sort_on_cpu(numbers_BHP, count, used_BH, others_BHP, groups, ranks);
  }
  if constexpr (kHasGpuKernels) {
    launch_counting_sort(
        counting_sort_params(numbers_BHP, count, used_BH, groups, others_BHP, ranks),
        current_stream(numbers_BHP));
  }
}

void check(const at::Tensor& numbers, std::int64_t count) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
  require(numbers.scalar_type() == at::kInt && numbers.size(2) <= kMost && count <= kMost,
          "counting sort: numbers must be int32, and their slots and count fit it");
}

at::Tensor contiguous(const at::Tensor& x) { return x.defined() ? x.contiguous() : x; }

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

RankedIndices rank_by_sorting(const at::Tensor& numbers_BHP, std::int64_t count,
                              const at::Tensor& others_BHP) {
  const auto in_range = [&](const at::Tensor& x) {
    return x.masked_fill(at::logical_or(x < 0, x >= count), count).to(at::kLong);
  };
  const at::Tensor number_BHP = in_range(numbers_BHP);
  const std::int64_t P = numbers_BHP.size(2);
  RankedIndices result{group_by_sorting(numbers_BHP, count), {}};
  const SortedIndices& sorted = result.sorted;
  SlotRanks& ranks = result.ranks;
  ranks.position_BHP =
      at::empty_like(sorted.order_BHP)
          .scatter_(2, sorted.order_BHP.to(at::kLong),
                    at::arange(P, sorted.order_BHP.options()).expand_as(numbers_BHP));
  ranks.rank_BHP = ranks.position_BHP - sorted.starts_BHR.gather(2, number_BHP);
  if (!others_BHP.defined()) return result;
  // Slots as numbers and as others together, by number, a slot's number before its other.
  const at::Tensor other_BHP = in_range(others_BHP),
                   both_BHR = at::stack({number_BHP, other_BHP}, 3).flatten(2).to(at::kInt);
  const at::Tensor order_BHR = group_by_sorting(both_BHR, count).order_BHP.to(at::kLong);
  const at::Tensor numbers_so_far_BHP =
      at::zeros_like(order_BHR)
          .scatter(2, order_BHR, at::remainder(order_BHR, 2).eq(0).to(at::kLong).cumsum(2))
          .unflatten(2, {P, 2})
          .select(3, 1);
  ranks.other_rank_BHP =
      (numbers_so_far_BHP - sorted.starts_BHR.gather(2, other_BHP) - 1).to(at::kInt);
  return result;
}

CountingSortParams counting_sort_params(const at::Tensor& numbers_BHP, std::int64_t count,
                                        const at::Tensor& used_BH, const SortedIndices& groups,
                                        const at::Tensor& others_BHP, const SlotRanks& ranks) {
  const auto data = [](const at::Tensor& x) { return of_head(x, 0, 0); };
  const auto result = [](const at::Tensor& x) { return result_of_head(x, 0, 0); };
  return {.heads = numbers_BHP.size(0) * numbers_BHP.size(1),
          .slots = static_cast<int>(numbers_BHP.size(2)),
          .count = static_cast<int>(count),
          .numbers = data(numbers_BHP),
          .used = data(used_BH),
          .order = result(groups.order_BHP),
          .starts = result(groups.starts_BHR),
          .positions = result(ranks.position_BHP),
          .ranks = result(ranks.rank_BHP),
          .others = data(others_BHP),
          .other_ranks = result(ranks.other_rank_BHP)};
}

SortedIndices counting_sort(const at::Tensor& numbers_BHP, std::int64_t count,
                            const at::Tensor& used_BH) {
  check(numbers_BHP, count);
  if (!has_kernel(numbers_BHP, count)) return group_by_sorting(numbers_BHP, count, used_BH);
  const SortedIndices groups = new_groups(numbers_BHP, count);
  sort_by_kernel(contiguous(numbers_BHP), count, contiguous(used_BH), {}, groups, {});
  return groups;
}

RankedIndices ranked_counting_sort(const at::Tensor& numbers_BHP, std::int64_t count,
                                   const at::Tensor& others_BHP) {
  check(numbers_BHP, count);
  if (!has_kernel(numbers_BHP, count)) return rank_by_sorting(numbers_BHP, count, others_BHP);
  const RankedIndices result{new_groups(numbers_BHP, count), new_ranks(numbers_BHP, others_BHP)};
  sort_by_kernel(contiguous(numbers_BHP), count, {}, contiguous(others_BHP), result.sorted,
                 result.ranks);
  return result;
}

}  // namespace birkhoff
