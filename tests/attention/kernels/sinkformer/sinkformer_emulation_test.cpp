// The source code of the GPU's kernels of doubly stochastic attention, run on the CPU by an
// emulated block of threads, against the reference in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/sinkformer/gpu_arguments.h"
#include "attention/kernels/sinkformer/gpu_kernels.h"
#include "tests/attention/kernels/sinkformer/sinkformer_problem.h"
#include "tests/cluster/base/emulated_gpu.h"

namespace birkhoff::test {
namespace {

// As attention/kernels/sinkformer/gpu_launch.cuh.
template <EmulatedNumber kNumber, int kHeadDim>
void run_kernels(const SinkformerParams& params, bool forward, bool backwards) {
  using Thread = EmulatedThread<kNumber>;
  const auto run = [&]<typename Body>(const SinkformerParams& p) {
    EmulatedBlock block(Body::kThreads, Body::kSharedBytes);
    for (std::int64_t task = 0; task < Body::num_tasks(p); ++task) {
      block.run(task, backwards, [&](int thread) { Body(Thread(block, thread), p).run(); });
    }
  };
  if (forward) {
    for_each_sinkformer_kernel<Thread, kHeadDim>(params, run);
  } else {
    for_each_sinkformer_backward_kernel<Thread, kHeadDim>(params, run);
  }
}

void run_pass(const SinkformerParams& params, bool forward, bool backwards) {
  with_sinkformer_head_dim(params.head_dim, [&]<int kHeadDim>() {
    if (params.dtype == KernelDtype::kHalf) {
      run_kernels<EmulatedNumber::kHalf, kHeadDim>(params, forward, backwards);
    } else {
      run_kernels<EmulatedNumber::kBFloat16, kHeadDim>(params, forward, backwards);
    }
  });
}

// Returns out, d_q, d_k and d_v. `backwards` reverses the order in which threads run.
std::vector<at::Tensor> solve_emulated(SinkformerProblem problem, bool backwards = false) {
  const DoublyStochasticAttention& in = problem.attention;
  EXPECT_EQ(why_not_gpu_kernels(in), "") << problem.name();
  HeadTensors x;
  x.q_BHLD = with_aligned_rows(in.q_BHLD);
  x.k_BHSD = with_aligned_rows(in.k_BHSD);
  x.v_BHSD = with_aligned_rows(in.v_BHSD);
  x.d_out_BHLD = with_aligned_rows(problem.d_out_BHLD);
  x.out_BHLD = at::zeros_like(x.q_BHLD);
  x.d_q_BHLD = at::zeros_like(x.q_BHLD);
  x.d_k_BHSD = at::zeros_like(x.k_BHSD);
  x.d_v_BHSD = at::zeros_like(x.v_BHSD);
  x.query_lengths_B = in.query_lengths_B;
  x.key_lengths_B = in.key_lengths_B;
  const SinkformerVectors potentials = new_sinkformer_vectors(x, in.half_steps),
                          coefficients = new_sinkformer_vectors(x, in.half_steps);
  // Values that a kernel forgets to write stay NaN.
  for (const SinkformerVectors& each : {potentials, coefficients}) {
    each.queries_BHtL.fill_(NAN);
    each.keys_BHtS.fill_(NAN);
  }
  run_pass(sinkformer_params(x, in.half_steps, potentials), /*forward=*/true, backwards);
  run_pass(sinkformer_params(x, in.half_steps, potentials,
                             in.gradient == BalanceGradient::kUnrolled, coefficients),
           /*forward=*/false, backwards);
  return {x.out_BHLD, x.d_q_BHLD, x.d_k_BHSD, x.d_v_BHSD};
}

void check(const SinkformerProblem& problem) {
  expect_errors_of_reference(solve_emulated(problem), problem);
}

at::ScalarType dtype_of(std::uint64_t seed) { return seed % 3 == 0 ? at::kHalf : at::kBFloat16; }

TEST(SinkformerEmulation, ErrorsAreThoseOfTheReference) {
  std::uint64_t seed = 0;
  for (const std::int64_t D : {8, 40, 64, 128}) {
    for (const int half_steps : {1, 3, 5}) {
      for (const auto& [L, S] : {std::pair(37, 70), {130, 61}, {64, 64}}) {
        ++seed;
        check(make_sinkformer_problem({.L = L, .S = S, .D = D, .half_steps = half_steps},
                                      dtype_of(seed), seed));
      }
    }
  }
}

// A coupling of one query with uniform marginals is uniform, so nothing depends on q and k: the
// terms of their gradients cancel.
TEST(SinkformerEmulation, OneQueryTakesTheMean) {
  const SinkformerProblem problem = make_sinkformer_problem({.L = 1, .S = 9}, at::kHalf, 100);
  const std::vector<at::Tensor> results = solve_emulated(problem),
                                exact = solve(problem.to(at::kDouble), Path::kReference);
  EXPECT_LE(max_difference(results[0].to(at::kDouble), exact[0]), 0x1p-11);
  EXPECT_LE(results[1].abs().max().item<float>(), 1e-6);
  EXPECT_LE(results[2].abs().max().item<float>(), 1e-6);
}

TEST(SinkformerEmulation, FewRows) {
  std::uint64_t seed = 101;
  for (const auto& [L, S] : {std::pair(1, 1), {9, 1}, {2, 65}, {65, 2}}) {
    ++seed;
    check(make_sinkformer_problem({.L = L, .S = S, .D = 24}, dtype_of(seed), seed));
  }
}

TEST(SinkformerEmulation, HeadsAndSequencesWithPadding) {
  for (const int half_steps : {1, 3, 5}) {
    for (const auto& [n, m] : {std::pair(20, 70), {66, 3}, {64, 64}}) {
      const std::uint64_t seed = 200 + static_cast<std::uint64_t>(n);
      check(with_padding(make_sinkformer_problem(
                             {.L = 70, .S = 72, .D = 40, .half_steps = half_steps, .B = 2, .H = 2},
                             at::kBFloat16, seed),
                         n, m));
    }
  }
}

// Results of such a sequence are 0, whatever its rows hold.
TEST(SinkformerEmulation, SequencesWithoutQueriesOrKeys) {
  for (const auto& [n, m] : {std::pair(0, 20), {20, 0}, {0, 0}}) {
    const SinkformerProblem problem =
        with_padding(make_sinkformer_problem({.L = 33, .S = 20, .B = 2}, at::kBFloat16, 210), n, m);
    const std::vector<at::Tensor> results = solve_emulated(problem);
    for (const at::Tensor& x : results) EXPECT_EQ(x[0].abs().max().item<float>(), 0) << n;
    expect_errors_of_reference(results, problem);
  }
}

TEST(SinkformerEmulation, TheTruncatedGradient) {
  for (const std::int64_t D : {64, 128}) {
    SinkformerProblem problem =
        make_sinkformer_problem({.L = 70, .S = 33, .D = D, .half_steps = 5}, at::kBFloat16, 220);
    const std::vector<at::Tensor> unrolled = solve_emulated(problem);
    problem.attention.gradient = BalanceGradient::kTruncated;
    const std::vector<at::Tensor> truncated = solve_emulated(problem);
    expect_errors_of_reference(truncated, problem);
    EXPECT_GT(max_difference(truncated[1], unrolled[1]), 1e-2);
    EXPECT_TRUE(at::equal(truncated[3], unrolled[3]));  // values do not balance
  }
}

// Differences of logits of several hundred, and all half-steps with the same potentials.
TEST(SinkformerEmulation, LargeLogits) {
  for (const int half_steps : {1, 3, 9}) {
    check(make_sinkformer_problem({.L = 66, .S = 80, .half_steps = half_steps, .size = 6},
                                  at::kBFloat16, 230));
  }
}

TEST(SinkformerEmulation, OneHalfStepIsSoftmax) {
  const SinkformerProblem problem =
      make_sinkformer_problem({.L = 70, .S = 90, .half_steps = 1, .H = 2}, at::kHalf, 240);
  SinkformerProblem exact = problem.to(at::kDouble);
  const at::Tensor scores = at::matmul(exact.q(), exact.k().transpose(2, 3)) / std::sqrt(64.0);
  expect_as_exact(solve_emulated(problem)[0], solve(problem, Path::kReference)[0],
                  at::matmul(at::softmax(scores, 3), exact.v()), "softmax");
}

TEST(SinkformerEmulation, SameBitsInAnyOrderOfThreads) {
  for (const std::int64_t D : {64, 128}) {
    const SinkformerProblem problem = with_padding(
        make_sinkformer_problem({.L = 70, .S = 130, .D = D, .B = 2}, at::kHalf, 250), 67, 101);
    const auto once = solve_emulated(problem), again = solve_emulated(problem, true);
    for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(once[i], again[i])) << i;
  }
}

// Rows whose place in memory is not that of their number, as in the layers' [B, L, H, D].
TEST(SinkformerEmulation, RowsOfLayers) {
  SinkformerProblem problem =
      make_sinkformer_problem({.L = 40, .S = 40, .D = 16, .B = 2, .H = 3}, at::kBFloat16, 260);
  const auto expected = solve_emulated(problem);
  for (at::Tensor* x : {&problem.q(), &problem.k(), &problem.v(), &problem.d_out_BHLD}) {
    *x = x->transpose(1, 2).contiguous().transpose(1, 2);
  }
  const auto results = solve_emulated(problem);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(results[i], expected[i])) << i;
}

// A NaN of a token that exists reaches all results of its head and sequence, because all weights
// depend on it; a NaN in padding reaches nothing.
TEST(SinkformerEmulation, NaNReachesItsHeadAndSequence) {
  const SinkformerProblem problem = with_padding(
      make_sinkformer_problem({.L = 70, .S = 80, .D = 16, .B = 2, .H = 2}, at::kBFloat16, 270), 66,
      50);
  const std::vector<at::Tensor> finite = solve_emulated(problem);
  const auto with_nan = [&](int which, std::int64_t row) {
    SinkformerProblem changed = problem;
    at::Tensor* const x = which == 0 ? &changed.q() : which == 1 ? &changed.k() : &changed.v();
    *x = x->clone();
    (*x)[0][1][row][3] = NAN;
    return solve_emulated(changed);
  };
  for (const int which : {0, 1, 2}) {
    const std::vector<at::Tensor> results = with_nan(which, 49);
    for (std::size_t i = 0; i < results.size(); ++i) {
      at::Tensor rest = results[i].clone();
      at::Tensor spoiled = rest[0][1].narrow(0, 0, i < 2 ? 66 : 50);
      if (which == 2 && i == 0) spoiled = spoiled.select(1, 3);  // that element of the outputs
      if (which != 2 || i != 3) {                                // d_v does not depend on v
        EXPECT_TRUE(spoiled.isnan().all().item<bool>()) << which << " result " << i;
        spoiled.copy_(which == 2 && i == 0 ? finite[i][0][1].narrow(0, 0, 66).select(1, 3)
                                           : finite[i][0][1].narrow(0, 0, spoiled.size(0)));
      }
      EXPECT_TRUE(at::equal(rest, finite[i])) << which << " result " << i;
    }
    const std::vector<at::Tensor> padding = with_nan(which, which == 0 ? 66 : 50);
    for (std::size_t i = 0; i < padding.size(); ++i) {
      EXPECT_TRUE(at::equal(padding[i], finite[i])) << which << " result " << i;
    }
  }
}

TEST(SinkformerEmulation, ProblemsThatTheKernelsDoNotTake) {
  const auto why = [](std::int64_t D, at::ScalarType dtype, auto change) {
    SinkformerProblem problem = make_sinkformer_problem({.L = 4, .S = 4, .D = D}, dtype, 280);
    change(problem.attention);
    return why_not_gpu_kernels(problem.attention);
  };
  const auto none = [](DoublyStochasticAttention&) {};
  EXPECT_EQ(why(64, at::kFloat, none), "the dtype is fp32, not bf16 or fp16");
  EXPECT_EQ(why(136, at::kHalf, none), "a head has 136 channels, more than 128");
  EXPECT_EQ(why(12, at::kHalf, none), "a head has 12 channels, which are no multiple of 8");
  EXPECT_EQ(why(64, at::kHalf,
                [](auto& in) {
                  in.same_document_BLS = at::ones({1, 4, 4}, at::kBool);
                }),
            "each document is balanced on its own");
  EXPECT_EQ(why(64, at::kHalf, [](auto& in) { in.gradient = BalanceGradient::kImplicit; }),
            "the implicit gradient has no GPU kernel");
  EXPECT_EQ(why(64, at::kHalf,
                [](auto& in) {
                  in.dropout = 0.1f;
                  in.noise = NoiseKey{};
                }),
            "attention dropout has no such kernel");
}

}  // namespace
}  // namespace birkhoff::test
