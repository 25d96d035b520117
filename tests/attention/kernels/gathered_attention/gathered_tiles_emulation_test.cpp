// The tensor-core kernels of attention over gathered rows, run on the CPU by an emulated block of
// threads, are as exact as the reference.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/kernels/gathered_attention/gpu_arguments.h"
#include "attention/kernels/gathered_attention/tiles/gpu_kernels.h"
#include "tests/attention/kernels/gathered_attention/gathered_emulated.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/cluster/base/emulated_gpu.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

template <typename Thread, typename Body>
void run_kernel(const GatheredParams& params) {
  EmulatedBlock block(Body::kThreads, Body::kSharedBytes);
  for (std::int64_t task = 0; task < Body::num_tasks(params); ++task) {
    // Both orders of threads.
    block.run(task, task % 2 == 1, [&](int thread) { Body(Thread(block, thread), params).run(); });
  }
}

// As attention/kernels/gathered_attention/tiles/gpu_launch.cuh.
template <EmulatedNumber kNumber, int kHeadDim>
void run_forward(const GatheredParams& params) {
  using Thread = EmulatedThread<kNumber>;
  with_forward_tiles<Thread, kHeadDim>(params,
                                       [&]<typename Body>() { run_kernel<Thread, Body>(params); });
}
template <EmulatedNumber kNumber, int kHeadDim>
void run_backward(const GatheredParams& params) {
  using Thread = EmulatedThread<kNumber>;
  for_each_backward_tiles<Thread, kHeadDim>(
      params, [&]<typename Body>() { run_kernel<Thread, Body>(params); });
}

// Calls f with the emulated number and the compile-time head dim.
template <typename Function>
void with_kernel(const GatheredParams& params, Function f) {
  const auto with_number = [&]<int kHeadDim>() {
    if (params.dtype == KernelDtype::kHalf) {
      f.template operator()<EmulatedNumber::kHalf, kHeadDim>();
    } else {
      f.template operator()<EmulatedNumber::kBFloat16, kHeadDim>();
    }
  };
  with_head_dim(params.head_dim, with_number);
}

constexpr EmulatedTiles kTiles{
    .forward =
        [](const GatheredParams& params) {
          with_kernel(params, [&]<EmulatedNumber kNumber, int kHeadDim>() {
            run_forward<kNumber, kHeadDim>(params);
          });
        },
    .backward =
        [](const GatheredParams& params) {
          with_kernel(params, [&]<EmulatedNumber kNumber, int kHeadDim>() {
            run_backward<kNumber, kHeadDim>(params);
          });
        }};

std::vector<at::Tensor> solve_on_tiles(const GatheredProblem& problem) {
  return solve_emulated(problem, &kTiles);
}

class GatheredTilesMergedAs : public ::testing::TestWithParam<SlotMerge> {};
INSTANTIATE_TEST_SUITE_P(Merges, GatheredTilesMergedAs,
                         ::testing::Values(SlotMerge::kOneSoftmax, SlotMerge::kMean));

TEST_P(GatheredTilesMergedAs, ErrorsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    int checked = 0;
    for (int seed = dtype == at::kHalf; seed < 60; seed += 6) {
      checked +=
          expect_errors_of_the_reference(seed, dtype, 70, out_rounding(dtype), solve_on_tiles,
                                         GetParam(), random_problem_of_width<0>);
    }
    EXPECT_GT(checked, 2) << dtype;
  }
}

// Results of slots are written to rows.
TEST_P(GatheredTilesMergedAs, ErrorsOfRowsInOneSlotAreThoseOfTheReference) {
  for (const auto random_problem : {random_problem_of_rows_once<0>, random_problem_of_rows_once<72>,
                                    random_problem_of_rows_once<256>}) {
    int checked = 0;
    for (int seed = 0; seed < 24; seed += 2) {
      checked +=
          expect_errors_of_the_reference(seed, at::kBFloat16, 70, out_rounding(at::kBFloat16),
                                         solve_on_tiles, GetParam(), random_problem);
    }
    EXPECT_GT(checked, 2);
  }
}

// Relative positions and dropout, for heads of any number of channels.
TEST_P(GatheredTilesMergedAs, ErrorsWithTermsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    int checked = 0;
    for (int seed = dtype == at::kHalf; seed < 60; seed += 4) {
      checked +=
          expect_errors_of_the_reference(seed, dtype, 70, out_rounding(dtype), solve_on_tiles,
                                         GetParam(), random_problem_of_distinct_keys);
    }
    EXPECT_GT(checked, 4) << dtype;
  }
}

// One segment of all rows; a query sees the `width` last keys.
GatheredProblem band_problem(std::int64_t num_tokens, std::int64_t width) {
  GatheredProblem problem = window_problem(1, 1, num_tokens, width);
  const RowLists all = make_row_lists(at::arange(num_tokens, at::kInt).view({1, 1, -1}),
                                      at::full({1, 1, 1}, num_tokens, at::kInt), num_tokens);
  problem.attention.rows = {all, all, {.least = 0, .most = width - 1}};
  return problem;
}

// More segments than one load of a warp's lanes finds; most are empty.
GatheredProblem many_segments_problem() {
  constexpr std::int64_t kTokens = 150, kSegments = 1'100;
  GatheredProblem problem = window_problem(1, 1, kTokens, 1);
  const at::Tensor ends_G =
      at::div(at::arange(1, kSegments + 1, at::kInt) * kTokens, kSegments, "floor").to(at::kInt);
  const at::Tensor sparse_G = at::div(ends_G, 7, "floor") * 7;
  sparse_G[kSegments - 1] = kTokens;
  const RowLists lists = make_row_lists(at::arange(kTokens, at::kInt).view({1, 1, -1}),
                                        sparse_G.view({1, 1, -1}), kTokens);
  problem.attention.rows = {lists, lists, {}};
  return problem;
}

TEST(GatheredTiles, BandsAndDenseAttentionAreAsExactAsTheReference) {
  for (const GatheredProblem& problem : {band_problem(300, 20), dense_problem(150),
                                         distances_problem(90, 70), many_segments_problem()}) {
    const auto exact = solve(problem.to(at::kDouble), Path::kReference);
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const auto reference = solve(problem.to(dtype), Path::kReference),
                 kernel = solve_on_tiles(problem.to(dtype));
      ASSERT_EQ(kernel.size(), reference.size());
      for (std::size_t i = 0; i < kernel.size(); ++i) {
        expect_as_exact(kernel[i], reference[i], exact[i],
                        problem.name + " result " + std::to_string(i));
      }
    }
  }
}

TEST(GatheredTiles, RelativePositionsNeedDistinctKeys) {
  GatheredAttention in = band_problem(100, 20).to(at::kBFloat16).attention;
  in.relative = {.keys_HRD = random_tensor({1, 3, 64}, at::kBFloat16, 1), .values_HRD = {}};
  EXPECT_NE(why_not_tensor_cores(in), "");
  in.relative = {};
  EXPECT_EQ(why_not_tensor_cores(in), "");
}

// NaN times a probability of 0 would be NaN.
TEST(GatheredTiles, TilesThatNoQueryOfATileSeesAreNotRead) {
  constexpr std::int64_t kTokens = 4 * kTileRows, kSpoiled = kTileRows;
  GatheredProblem problem = band_problem(kTokens, 20).to(at::kBFloat16);
  for (const at::Tensor& x : {problem.attention.k_BHSD, problem.attention.v_BHSD}) {
    x.detach().narrow(2, 0, kSpoiled).fill_(NAN);
  }
  const auto results = solve_on_tiles(problem);
  // Out and d_q of queries, and d_k and d_v of keys, two tiles later.
  for (const std::size_t i : {0, 2, 3, 4}) {
    const at::Tensor later = results[i].narrow(2, 2 * kTileRows, kTokens - 2 * kTileRows);
    EXPECT_TRUE(later.isfinite().all().item<bool>()) << "result " << i;
    EXPECT_TRUE(results[i].isnan().any().item<bool>()) << "result " << i;
  }
}

TEST_P(GatheredTilesMergedAs, ErrorsOfWideHeadsAreThoseOfTheReference) {
  for (const auto random_problem : {random_problem_of_width<128>, random_problem_of_width<256>}) {
    int checked = 0;
    for (int seed = 0; seed < 30; seed += 6) {
      checked +=
          expect_errors_of_the_reference(seed, at::kBFloat16, 70, out_rounding(at::kBFloat16),
                                         solve_on_tiles, GetParam(), random_problem);
    }
    EXPECT_GT(checked, 0);
  }
}

}  // namespace
}  // namespace birkhoff::test
