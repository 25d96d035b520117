// The GPU kernels of attention over gathered rows are as exact as the reference.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attention/kernels/counting_sort/counting_sort.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

GatheredProblem on_gpu(const GatheredProblem& problem) {
  GatheredProblem there = problem;
  const auto move = [](at::Tensor& x) {
    if (x.defined()) x = x.detach().to(at::kCUDA);
  };
  GatheredAttention& in = there.attention;
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.relative.keys_HRD,
                        &in.relative.values_HRD, &in.relative.bias_HR, &in.sink_H}) {
    move(*x);
    if (x->defined()) x->set_requires_grad(true);
  }
  for (at::Tensor* x : {&in.rows.band.positions_q_BHL, &in.rows.band.positions_k_BHS,
                        &in.key_lengths_B, &there.d_out_BHLD, &there.d_lse_BHL}) {
    move(*x);
  }
  for (RowLists* lists : {&in.rows.queries, &in.rows.keys}) {
    RowLists made = make_row_lists(lists->rows_BHP.cuda(), lists->ends_BHG.cuda(), lists->num_rows,
                                   lists->distinct);
    made.once = lists->once;
    made.whole = lists->whole;
    *lists = made;
  }
  if (in.noise) {
    move(in.noise->step);
    move(in.noise->sample_ids_B);
  }
  return there;
}

// Solves twice.
std::vector<at::Tensor> solve_on_gpu(const GatheredProblem& problem) {
  const GatheredProblem there = on_gpu(problem);
  EXPECT_EQ(choose_path(there.attention, Path::kFused), Path::kFused);
  std::vector<at::Tensor> kernel = solve(there, Path::kFused);
  const auto again = solve(there, Path::kFused);
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    expect_same_bits(kernel[i], again[i], problem.name + " result " + std::to_string(i));
    kernel[i] = kernel[i].cpu();
  }
  return kernel;
}

// Also run under compute-sanitizer.
TEST(GatheredKernel, SmallIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int seed = 0; seed < 60; ++seed) {
      expect_errors_of_the_reference(seed, dtype, 300, out_rounding(dtype), solve_on_gpu);
    }
  }
}

class GatheredKernelMergedAs : public ::testing::TestWithParam<SlotMerge> {};
INSTANTIATE_TEST_SUITE_P(Merges, GatheredKernelMergedAs,
                         ::testing::Values(SlotMerge::kOneSoftmax, SlotMerge::kMean));

// Relative positions, dropout, sinks and grouped queries, on tensor cores where keys are distinct.
// Also run under compute-sanitizer.
TEST_P(GatheredKernelMergedAs, SmallWithTermsIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int seed = 0; seed < 60; ++seed) {
      for (const auto random_problem : {random_problem_with_terms, random_problem_with_dropout,
                                        random_problem_of_distinct_keys}) {
        expect_errors_of_the_reference(seed, dtype, 300, out_rounding(dtype), solve_on_gpu,
                                       GetParam(), random_problem);
      }
    }
  }
}

// Head dims for each of the tensor-core kernels. Also run under compute-sanitizer.
TEST_P(GatheredKernelMergedAs, SmallOnTensorCoresIsAsExactAsTheReference) {
  for (const auto random_problem :
       {random_problem_of_width<64>, random_problem_of_width<72>, random_problem_of_width<128>,
        random_problem_of_width<256>, random_problem_of_rows_once<64>,
        random_problem_of_rows_once<256>}) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      for (int seed = 0; seed < 40; seed += 3) {
        expect_errors_of_the_reference(seed, dtype, 300, out_rounding(dtype), solve_on_gpu,
                                       GetParam(), random_problem);
      }
    }
  }
}

// By the kernel and, beyond its count, by sorting. Also run under compute-sanitizer.
TEST(SortedIndices, SmallAreThoseOfTheCpu) {
  for (const int count : {5, CountingSortParams::kMaxCount, CountingSortParams::kMaxCount + 1}) {
    const at::Tensor numbers = at::randint(-2, count + 2, {2, 3, 1000}, at::kInt),
                     used = at::randint(0, 1001, {2, 3}, at::kInt);
    const SortedIndices expected = counting_sort(numbers, count, used),
                        made = counting_sort(numbers.cuda(), count, used.cuda());
    EXPECT_TRUE(at::equal(made.order_BHP.cpu(), expected.order_BHP)) << count;
    EXPECT_TRUE(at::equal(made.starts_BHR.cpu(), expected.starts_BHR)) << count;

    const at::Tensor others = at::randint(-2, count + 2, {2, 3, 1000}, at::kInt);
    const SlotRanks ranks = ranked_counting_sort(numbers, count, others).ranks,
                    made_ranks = ranked_counting_sort(numbers.cuda(), count, others.cuda()).ranks;
    for (const auto of :
         {&SlotRanks::position_BHP, &SlotRanks::rank_BHP, &SlotRanks::other_rank_BHP}) {
      EXPECT_TRUE(at::equal((made_ranks.*of).cpu(), ranks.*of)) << count;
    }
  }
}

TEST(GatheredKernel, LongWindowsAndDenseAttentionAreAsExactAsTheReference) {
  for (const GatheredProblem& problem :
       {window_problem(2, 4, 3000, 200), dense_problem(1500), distances_problem(1500, 1000)}) {
    const auto exact = solve(problem.to(at::kDouble), Path::kReference);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto reference = solve(problem.to(dtype), Path::kReference),
                 kernel = solve_on_gpu(problem.to(dtype));
      for (std::size_t i = 0; i < kernel.size(); ++i) {
        expect_as_exact(kernel[i], reference[i], exact[i],
                        problem.name + " result " + std::to_string(i));
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
