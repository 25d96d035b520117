// The tensor-core kernels of attention over gathered rows, run on the CPU by an emulated block of
// threads, are as exact as the reference.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attention/kernels/gathered_tiles/gpu_backward.h"
#include "attention/kernels/gathered_tiles/gpu_forward.h"
#include "tests/attention/gathered_emulated.h"
#include "tests/attention/gathered_problem.h"
#include "tests/attention/mechanism_cases.h"
#include "tests/cluster/base/emulated_gpu.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

template <typename Body, typename Thread, int kThreads>
void run_kernel(const GatheredParams& params, int shared_bytes) {
  EmulatedBlock block(kThreads, static_cast<std::uint32_t>(shared_bytes));
  for (std::int64_t task = 0; task < Body::num_tasks(params); ++task) {
    // Both orders of threads.
    block.run(task, task % 2 == 1, [&](int thread) { Body(Thread(block, thread), params).run(); });
  }
}

// As launch_gathered_forward() and launch_gathered_backward() in
// attention/kernels/gathered_tiles/gpu_launch.cuh.
template <EmulatedNumber kNumber, int kHeadDim>
void run_forward(const GatheredParams& params) {
  using Thread = EmulatedThread<kNumber>;
  using Shape = GatheredTilesShape<kHeadDim>;
  run_kernel<GatheredTilesForward<Thread, kHeadDim>, Thread, Shape::kThreads>(params,
                                                                              Shape::kForwardBytes);
}
template <EmulatedNumber kNumber, int kHeadDim>
void run_backward(const GatheredParams& params) {
  using Thread = EmulatedThread<kNumber>;
  using Shape = GatheredTilesShape<kHeadDim>;
  run_kernel<GatheredTilesQueries<Thread, kHeadDim>, Thread, Shape::kThreads>(params,
                                                                              Shape::kQueriesBytes);
  run_kernel<GatheredTilesKeys<Thread, kHeadDim>, Thread, Shape::kThreads>(params,
                                                                           Shape::kKeysBytes);
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
  if (params.head_dim <= 64) return with_number.template operator()<64>();
  if (params.head_dim <= 128) return with_number.template operator()<128>();
  with_number.template operator()<256>();
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

// The problem for tensor cores: no table, and D is `columns`.
GatheredProblem for_tensor_cores(GatheredProblem problem, std::int64_t columns,
                                 std::uint64_t seed) {
  GatheredAttention& in = problem.attention;
  in.relative = {};
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &problem.d_out_BHLD}) {
    // Numbers about as large as those that were there.
    const double size = x->detach().abs().max().item<double>() / 3;
    *x = random_tensor({x->size(0), x->size(1), x->size(2), columns}, at::kFloat, ++seed) * size;
  }
  return problem.to(at::kFloat);
}
template <std::int64_t kColumns>  // 0: those of the problem, rounded up
GatheredProblem random_problem_for_tensor_cores(int seed, int draw_index) {
  const GatheredProblem problem = random_problem_for_gpus(seed, draw_index);
  const std::int64_t D = problem.attention.q_BHLD.size(3);
  return for_tensor_cores(problem, kColumns > 0 ? kColumns : (D + 7) / 8 * 8,
                          static_cast<std::uint64_t>(1000 * seed + 10 * draw_index));
}

class GatheredTilesMergedAs : public ::testing::TestWithParam<PlaceMerge> {};
INSTANTIATE_TEST_SUITE_P(Merges, GatheredTilesMergedAs,
                         ::testing::Values(PlaceMerge::kOneSoftmax, PlaceMerge::kMean));

TEST_P(GatheredTilesMergedAs, ErrorsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    int checked = 0;
    for (int seed = dtype == at::kHalf; seed < 60; seed += 6) {
      checked +=
          expect_errors_of_the_reference(seed, dtype, 70, out_rounding(dtype), solve_on_tiles,
                                         GetParam(), random_problem_for_tensor_cores<0>);
    }
    EXPECT_GT(checked, 2) << dtype;
  }
}

// Tiles of keys before and after the window are not read.
TEST(GatheredTiles, WindowsAreAsExactAsTheReference) {
  const GatheredProblem problem = window_problem(1, 1, 200, 70);
  const auto exact = solve(problem.to(at::kDouble), Path::kReference);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const auto reference = solve(problem.to(dtype), Path::kReference),
               kernel = solve_on_tiles(problem.to(dtype));
    for (std::size_t i = 0; i < kernel.size(); ++i) {
      expect_as_exact(kernel[i], reference[i], exact[i], "result " + std::to_string(i));
    }
  }
}

TEST_P(GatheredTilesMergedAs, ErrorsOfWideHeadsAreThoseOfTheReference) {
  for (const auto random_problem :
       {random_problem_for_tensor_cores<128>, random_problem_for_tensor_cores<256>}) {
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
