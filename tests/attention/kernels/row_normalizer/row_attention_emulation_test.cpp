// The GPU kernels of attention with a sparse normalizer, run on the CPU, are as exact as the
// reference.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/kernels/row_normalizer/gpu_arguments.h"
#include "attention/kernels/row_normalizer/gpu_top_k.h"
#include "tests/attention/kernels/row_normalizer/row_attention_problem.h"
#include "tests/attention/kernels/row_normalizer/row_lists_emulated.h"
#include "tests/cluster/base/emulated_gpu.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

// In both orders of threads, which `backwards` exchanges.
template <typename Body, typename Thread, typename Params>
void run_kernel(const Params& params, int shared_bytes, bool backwards) {
  EmulatedBlock block(Body::kThreads, static_cast<std::uint32_t>(shared_bytes));
  for (std::int64_t task = 0; task < Body::num_tasks(params); ++task) {
    block.run(task, (task % 2 == 1) != backwards,
              [&](int thread) { Body(Thread(block, thread), params).run(); });
  }
}

// Calls f<Thread, kHeadDim>(), as the .cu files do.
template <typename Function>
void with_thread(const RowAttentionParams& params, Function f) {
  const auto with_number = [&]<int kHeadDim>() {
    if (params.dtype == KernelDtype::kHalf) {
      f.template operator()<EmulatedThread<EmulatedNumber::kHalf>, kHeadDim>();
    } else {
      f.template operator()<EmulatedThread<EmulatedNumber::kBFloat16>, kHeadDim>();
    }
  };
  if (params.head_dim <= 64) return with_number.template operator()<64>();
  with_number.template operator()<128>();
}

void run_top_k(const HeadTensors& x, const SavedRows& saved, bool backwards) {
  const RowArguments<TopKParams> arguments = top_k_arguments(x, saved);
  const TopKParams& params = arguments.params;
  if (x.d_out_BHLD.defined()) {
    arguments.tensors[0].fill_(NAN);
    return emulate_listed_gradients(params);
  }
  with_thread(params, [&]<typename Thread, int kHeadDim>() {
    using Body = TopKChoice<Thread, kHeadDim>;
    run_kernel<Body, Thread>(params, Body::shared_bytes(params), backwards);
  });
  emulate_listed_values(params);
}

struct Emulated {
  SavedRows saved;
  std::vector<at::Tensor> results;
};
// What the kernels must write holds NaN, or indices that do not exist, before.
Emulated emulate(const RowAttentionProblem& problem, bool backwards = false) {
  const RowAttention& in = problem.attention;
  EXPECT_EQ(why_not_gpu_rows(in), "");
  const auto spoilt = [](const at::Tensor& x) { return at::full_like(x, NAN); };
  HeadTensors x;
  x.q_BHLD = in.q_BHLD;
  x.k_BHSD = in.k_BHSD;
  x.v_BHSD = in.v_BHSD;
  x.out_BHLD = spoilt(x.q_BHLD);
  const SavedRows saved = new_saved_rows(in);
  saved.weight_BHLk.fill_(NAN);
  saved.index_BHLk.fill_(1 << 30);
  run_top_k(x, saved, backwards);
  x.d_out_BHLD = problem.d_out_BHLD;
  x.d_q_BHLD = spoilt(x.q_BHLD);
  x.d_k_BHSD = spoilt(x.k_BHSD);
  x.d_v_BHSD = spoilt(x.v_BHSD);
  run_top_k(x, saved, backwards);
  return {saved, {x.out_BHLD, x.d_q_BHLD, x.d_k_BHSD, x.d_v_BHSD}};
}

std::vector<at::Tensor> solve_rows(const RowAttentionProblem& problem) {
  return emulate(problem).results;
}

RowNormalizer top_k(std::int64_t k) { return {.kind = Normalizer::kTopK, .top_k = k}; }

// No lengths are multiples of a tile; one is below k; some differ, as in cross-attention.
const std::vector<RowAttentionSize> kSizes = {
    {150, 150, 64, true}, {70, 133, 40, false}, {133, 70, 128, false}, {5, 5, 8, true}};

TEST(TopKTiles, ErrorsAreThoseOfTheReference) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const RowAttentionSize& size : kSizes) {
      for (const std::int64_t k : {8, 64}) {
        expect_errors_of_the_reference(random_rows(size, top_k(k), dtype), solve_rows,
                                       fmt::format("top {} causal {}", k, size.causal));
      }
    }
  }
}

TEST(TopKTiles, RepeatedRunsHaveTheSameBits) {
  const RowAttentionProblem problem = random_rows({133, 70, 64, false}, top_k(8), at::kBFloat16);
  const auto results = solve_rows(problem), again = emulate(problem, /*backwards=*/true).results;
  for (std::size_t i = 0; i < results.size(); ++i) {
    expect_same_bits(results[i], again[i], fmt::format("result {}", i));
  }
}

// k differs between queries.
TEST(TopKTiles, ADivisorKeepsAShareOfWhatAQuerySees) {
  RowNormalizer normalizer = top_k(2);
  normalizer.top_divisor = 4;
  expect_errors_of_the_reference(random_rows({150, 150, 16, true}, normalizer, at::kBFloat16),
                                 solve_rows, "divisor");
}

// Whole numbers, whose products are exact and often equal: the lists are those of a stable sort.
TEST(TopKTiles, TheFirstOfEqualScoresAreKept) {
  constexpr std::int64_t kKept = 20;
  RowAttentionProblem problem = random_rows({70, 150, 64, false}, top_k(kKept), at::kBFloat16);
  RowAttention& in = problem.attention;
  in.q_BHLD = in.q_BHLD.sign();
  in.k_BHSD = (in.k_BHSD * 0.7).round();
  const at::Tensor scores_BHLS = at::matmul(in.q_BHLD.to(at::kDouble),
                                            in.k_BHSD.to(at::kDouble).transpose(2, 3)),
                   hidden_B1LS = (at::arange(150) >= in.end_BL.unsqueeze(2)).unsqueeze(1);
  const auto [sorted, order] = at::sort(scores_BHLS.masked_fill(hidden_B1LS, -1e9),
                                        /*stable=*/true, -1, /*descending=*/true);
  const at::Tensor expected =
      order.narrow(3, 0, kKept).masked_fill(sorted.narrow(3, 0, kKept) == -1e9, -1).to(at::kInt);
  EXPECT_GT((sorted.diff(1, 3) == 0).sum().item<std::int64_t>(), 10000);
  EXPECT_TRUE(at::equal(emulate(problem).saved.index_BHLk, expected));
}

// NaN reaches only queries that see it and the keys that these keep; the others keep their bits.
TEST(TopKTiles, NaNStaysWithQueriesThatSeeIt) {
  constexpr std::int64_t kTokens = 150, kRow = 70;
  const auto solve = [&](std::size_t which, double number) {
    RowAttentionProblem problem = random_rows({kTokens, kTokens, 24, true}, top_k(3), at::kHalf);
    RowAttention& in = problem.attention;
    in.first_BL = (in.end_BL - 3).clamp_min(0);
    const std::vector<at::Tensor> inputs{in.q_BHLD, in.k_BHSD, in.v_BHSD, problem.d_out_BHLD};
    inputs[which].select(2, kRow).select(2, 5).fill_(number);
    return emulate(problem).results;
  };
  const at::Tensor token_L = at::arange(kTokens);
  for (std::size_t which = 0; which < 4; ++which) {
    const std::vector<at::Tensor> nan = solve(which, NAN), finite = solve(which, 0.5);
    const std::int64_t last = which == 1 || which == 2 ? kRow + 2 : kRow;  // query that sees it
    const at::Tensor& spoiled = nan[which == 3 ? 1 : 0].narrow(2, kRow, last - kRow + 1);
    if (which == 2) {
      EXPECT_TRUE(spoiled.select(3, 5).isnan().all().item<bool>());
    } else {
      EXPECT_TRUE(spoiled.isnan().all().item<bool>()) << which;
    }
    for (std::size_t i = 0; i < nan.size(); ++i) {
      const std::int64_t first = i < 2 ? kRow : kRow - 2;  // query, or key that these see
      const at::Tensor others = at::logical_or(token_L<first, token_L> last).nonzero().flatten();
      expect_same_bits(nan[i].index_select(2, others), finite[i].index_select(2, others),
                       fmt::format("input {} result {}", which, i));
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
