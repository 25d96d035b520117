// The GPU kernels of attention over gathered rows, run on the CPU, are as exact as the reference.
// Legend: B batch, H heads, L queries, S keys, D head dim.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "attention/kernels/counting_sort/counting_sort.h"
#include "tests/attention/kernels/gathered_attention/gathered_emulated.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

std::vector<at::Tensor> emulate(const GatheredProblem& problem) { return solve_emulated(problem); }

TEST(GatheredKernel, ErrorsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    int checked = 0;
    for (int seed = 0; seed < 60; seed += 3) {
      checked += expect_errors_of_the_reference(seed, dtype, 100, out_rounding(dtype), emulate);
    }
    EXPECT_GT(checked, 5) << dtype;
  }
}

// By counting on the CPU, by sorting, and by the kernel.
TEST(SortedIndices, AreTheSameOnAllPaths) {
  at::manual_seed(1);
  for (const std::int64_t slots : {0, 1, 31, 32, 257, 1000}) {
    for (const int count : {1, 5, 40, 3000, CountingSortParams::kMaxCount}) {
      for (const bool partly_used : {false, true}) {
        // Some slots have no number; low numbers are frequent.
        const at::Tensor some = at::randint(-2, count + 2, {2, 3, slots}, at::kInt),
                         low = at::randint(-2, std::min(count, 4), {2, 3, slots}, at::kInt),
                         numbers =
                             at::where(at::randint(0, 2, {2, 3, slots}, at::kBool), some, low);
        const at::Tensor used =
            partly_used ? at::randint(0, slots + 1, {2, 3}, at::kInt) : at::Tensor();
        const SortedIndices counted = counting_sort(numbers, count, used),
                            sorted = group_by_sorting(numbers, count, used);
        const SortedIndices emulated{at::full_like(counted.order_BHP, -7),
                                     at::full_like(counted.starts_BHR, -7)};
        emulate_number_groups(counting_sort_params(numbers, count, used, emulated));
        for (const SortedIndices& groups : {sorted, emulated}) {
          EXPECT_TRUE(at::equal(groups.order_BHP, counted.order_BHP)) << slots << " " << count;
          EXPECT_TRUE(at::equal(groups.starts_BHR, counted.starts_BHR)) << slots << " " << count;
        }
      }
    }
  }
}

TEST(SortedIndices, RanksAreTheSameOnAllPaths) {
  at::manual_seed(1);
  const auto expect_equal = [](const RankedIndices& a, const RankedIndices& b,
                               const std::string& what) {
    const auto tensors = [](const RankedIndices& x) {
      return std::vector{x.sorted.order_BHP, x.sorted.starts_BHR, x.ranks.position_BHP,
                         x.ranks.rank_BHP, x.ranks.other_rank_BHP};
    };
    const auto of_a = tensors(a), of_b = tensors(b);
    for (std::size_t i = 0; i < of_a.size(); ++i) {
      ASSERT_EQ(of_a[i].defined(), of_b[i].defined()) << what << i;
      if (of_a[i].defined()) {
        EXPECT_TRUE(at::equal(of_a[i], of_b[i])) << what << i;
      }
    }
  };
  for (const std::int64_t slots : {0, 1, 31, 32, 257, 1000}) {
    for (const int count : {1, 5, 300}) {
      const auto draw = [&] { return at::randint(-1, count + 1, {2, 3, slots}, at::kInt); };
      const at::Tensor numbers = draw(), given = draw();
      for (const at::Tensor& others : {at::Tensor(), given, numbers}) {
        const std::string what = fmt::format("{} slots of {} numbers, tensor ", slots, count);
        const RankedIndices made = ranked_counting_sort(numbers, count, others);
        const SortedIndices sorted = counting_sort(numbers, count);
        EXPECT_TRUE(at::equal(made.sorted.order_BHP, sorted.order_BHP)) << what;
        EXPECT_TRUE(at::equal(made.sorted.starts_BHR, sorted.starts_BHR)) << what;
        expect_equal(made, rank_by_sorting(numbers, count, others), what);

        const auto blank = [](const at::Tensor& x) {
          return x.defined() ? at::full_like(x, -7) : x;
        };
        const SlotRanks& ranks = made.ranks;
        const RankedIndices emulated{
            {blank(sorted.order_BHP), blank(sorted.starts_BHR)},
            {blank(ranks.position_BHP), blank(ranks.rank_BHP), blank(ranks.other_rank_BHP)}};
        emulate_number_groups(
            counting_sort_params(numbers, count, {}, emulated.sorted, others, emulated.ranks));
        expect_equal(made, emulated, what);
      }
      // Each slot sees the slots of its own number up to itself.
      const SlotRanks own = ranked_counting_sort(numbers, count, numbers).ranks;
      EXPECT_TRUE(at::equal(own.rank_BHP, own.other_rank_BHP));
    }
  }
}

void expect_near_the_reference(const GatheredProblem& problem) {
  const auto expected = solve(problem.to(at::kDouble), Path::kReference), kernel = emulate(problem);
  ASSERT_EQ(kernel.size(), expected.size());
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    const double scale = std::max(1.0, expected[i].abs().max().item<double>());
    EXPECT_LE(max_difference(kernel[i], expected[i]), 1e-4 * scale)
        << problem.name << " result " << i;
  }
}

// Small shapes, empty lists and single rows, for which errors are not compared.
TEST(GatheredKernel, IsNearTheReference) {
  for (int seed = 0; seed < 120; seed += 3) {
    expect_near_the_reference(random_gathered_problem(seed));
  }
}

TEST(GatheredKernel, WindowsAreAsExactAsTheReference) {
  const GatheredProblem problem = window_problem(1, 2, 200, 70);
  const auto exact = solve(problem.to(at::kDouble), Path::kReference);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto reference = solve(problem.to(dtype), Path::kReference),
               kernel = emulate(problem.to(dtype));
    for (std::size_t i = 0; i < kernel.size(); ++i) {
      expect_as_exact(kernel[i], reference[i], exact[i], "result " + std::to_string(i));
    }
  }
}

class GatheredKernelMergedAs : public ::testing::TestWithParam<SlotMerge> {};
INSTANTIATE_TEST_SUITE_P(Merges, GatheredKernelMergedAs,
                         ::testing::Values(SlotMerge::kOneSoftmax, SlotMerge::kMean));

// Relative positions, dropout, sinks and grouped queries.
TEST_P(GatheredKernelMergedAs, ErrorsWithTermsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    int checked = 0;
    for (int seed = 0; seed < 60; seed += 4) {
      checked += expect_errors_of_the_reference(
          seed, dtype, 100, out_rounding(dtype), emulate, GetParam(),
          seed % 8 == 0 ? random_problem_with_dropout : random_problem_with_terms);
    }
    EXPECT_GT(checked, 5) << dtype;
  }
}

TEST_P(GatheredKernelMergedAs, IsNearTheReferenceWithTerms) {
  for (int seed = 1; seed < 120; seed += 9) {
    GatheredProblem problem =
        seed % 2 == 0 ? random_problem_with_dropout(seed) : random_problem_with_terms(seed);
    problem.attention.merge = GetParam();
    expect_near_the_reference(problem);
  }
}

// All heads share the tables.
TEST_P(GatheredKernelMergedAs, ManyHeadsAddUpTheTables) {
  GatheredProblem problem = window_problem(1, 130, 40, 12);
  GatheredAttention& in = problem.attention;
  in.merge = GetParam();
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &problem.d_out_BHLD}) {
    *x = x->detach().narrow(3, 0, 5);
  }
  in.relative.keys_HRD = random_tensor({1, 21, 5}, at::kFloat, 9);
  in.relative.values_HRD = random_tensor({1, 21, 5}, at::kFloat, 10);
  in.relative.least = -20;
  expect_near_the_reference(problem.to(at::kFloat));
}

}  // namespace
}  // namespace birkhoff::test
