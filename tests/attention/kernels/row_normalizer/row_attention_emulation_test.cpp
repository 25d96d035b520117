// The GPU kernels of attention with a sparse normalizer, run on the CPU, are as exact as the
// reference.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/kernels/row_normalizer/gpu_arguments.h"
#include "attention/kernels/row_normalizer/gpu_entmax_backward.h"
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

template <template <typename, int> typename... Body>
void run_kernels(const EntmaxParams& params, bool backwards) {
  with_thread(params, [&]<typename Thread, int kHeadDim>() {
    (run_kernel<Body<Thread, kHeadDim>, Thread>(params, Body<Thread, kHeadDim>::kSharedBytes,
                                                backwards),
     ...);
  });
}

void run_top_k(const RowTensors& x, const SavedRows& saved, bool backwards) {
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

void run_entmax(const RowTensors& x, const SavedRows& saved, const at::Tensor& d_alpha_BHL,
                bool backwards) {
  const RowArguments<EntmaxParams> arguments = entmax_arguments(x, saved, d_alpha_BHL);
  if (!x.d_out_BHLD.defined()) return run_kernels<EntmaxForward>(arguments.params, backwards);
  arguments.tensors[1].fill_(NAN);
  run_kernels<EntmaxQueries, EntmaxKeys>(arguments.params, backwards);
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
  RowTensors x;
  x.q_BHLD = in.q_BHLD;
  x.k_BHSD = in.k_BHSD;
  x.v_BHSD = in.v_BHSD;
  x.out_BHLD = spoilt(x.q_BHLD);
  x.terms_BHLS = in.distance_terms_BHLS;
  const SavedRows saved = new_saved_rows(in);
  for (const at::Tensor& each : {saved.weight_BHLk, saved.threshold_BHL}) {
    if (each.defined()) each.fill_(NAN);
  }
  if (saved.index_BHLk.defined()) saved.index_BHLk.fill_(1 << 30);
  at::Tensor d_alpha_BHL;
  if (in.normalizer.alpha_H.defined()) d_alpha_BHL = spoilt(saved.threshold_BHL);
  const auto run = [&] {
    if (in.normalizer.kind == Normalizer::kTopK) return run_top_k(x, saved, backwards);
    run_entmax(x, saved, d_alpha_BHL, backwards);
  };
  run();
  x.d_out_BHLD = problem.d_out_BHLD;
  x.d_q_BHLD = spoilt(x.q_BHLD);
  x.d_k_BHSD = spoilt(x.k_BHSD);
  x.d_v_BHSD = spoilt(x.v_BHSD);
  if (x.terms_BHLS.defined()) x.d_terms_BHLS = at::zeros_like(x.terms_BHLS);
  run();
  Emulated emulated{saved, {x.out_BHLD, x.d_q_BHLD, x.d_k_BHSD, x.d_v_BHSD}};
  if (d_alpha_BHL.defined()) {
    emulated.results.push_back(
        d_alpha_BHL.to(at::kDouble).sum(2).sum(0).to(in.normalizer.alpha_H.scalar_type()));
  }
  if (x.terms_BHLS.defined()) emulated.results.push_back(x.d_terms_BHLS);
  return emulated;
}

std::vector<at::Tensor> solve_rows(const RowAttentionProblem& problem) {
  return emulate(problem).results;
}

// Exponents per head: softmax nearly, and others.
std::vector<RowNormalizer> entmaxes() {
  return {{.kind = Normalizer::kSparsemax},
          {.kind = Normalizer::kEntmax15},
          {.kind = Normalizer::kEntmax, .alpha_H = at::tensor({1.1, 1.7}, at::kFloat)}};
}
RowNormalizer top_k(std::int64_t k) { return {.kind = Normalizer::kTopK, .top_k = k}; }

// No lengths are multiples of a tile; one is below k; some differ, as in cross-attention and with
// earlier tokens as keys.
const std::vector<RowAttentionSize> kSizes = {{150, 150, 64, true},
                                              {70, 133, 40, false},
                                              {133, 70, 128, false},
                                              {5, 5, 8, true},
                                              {70, 150, 64, true, /*distances=*/true},
                                              {133, 133, 128, true, /*distances=*/true}};

TEST(TopKTiles, ErrorsAreThoseOfTheReference) {
  const auto check = [](const RowAttentionSize& size, std::int64_t k, at::ScalarType dtype) {
    expect_errors_of_the_reference(random_rows(size, top_k(k), dtype), solve_rows,
                                   fmt::format("top {} causal {}", k, size.causal));
  };
  for (const RowAttentionSize& size : kSizes) {
    for (const std::int64_t k : {8, 64}) check(size, k, at::kBFloat16);
  }
  check(kSizes[0], 8, at::kHalf);
}

TEST(RowTiles, RepeatedRunsHaveTheSameBits) {
  std::vector<RowNormalizer> normalizers = entmaxes();
  normalizers.push_back(top_k(8));
  for (const RowNormalizer& each : normalizers) {
    const RowAttentionProblem problem = random_rows({133, 70, 64, false}, each, at::kBFloat16);
    const auto results = solve_rows(problem), again = emulate(problem, /*backwards=*/true).results;
    for (std::size_t i = 0; i < results.size(); ++i) {
      expect_same_bits(results[i], again[i],
                       fmt::format("normalizer {} result {}", static_cast<int>(each.kind), i));
    }
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

// Few keys and most keys have weights.
TEST(EntmaxTiles, ErrorsAreThoseOfTheReference) {
  const auto check = [](const RowAttentionSize& size, const RowNormalizer& normalizer,
                        double factor, at::ScalarType dtype) {
    RowAttentionProblem problem = random_rows(size, normalizer, dtype);
    problem.attention.q_BHLD = problem.attention.q_BHLD * factor;
    expect_errors_of_the_reference(
        problem, solve_rows,
        fmt::format("normalizer {} causal {} factor {}", static_cast<int>(normalizer.kind),
                    size.causal, factor));
  };
  for (const RowNormalizer& normalizer : entmaxes()) {
    for (const RowAttentionSize& size : kSizes) {
      check(size, normalizer, size.causal ? 4 : 0.1, at::kBFloat16);
    }
    check(kSizes[0], normalizer, 0.1, at::kHalf);
  }
}

// Equal scores have equal weights.
TEST(EntmaxTiles, EqualScoresAreAMean) {
  for (const RowNormalizer& normalizer : entmaxes()) {
    RowAttentionProblem problem = random_rows({70, 150, 64, false}, normalizer, at::kHalf);
    RowAttention& in = problem.attention;
    in.q_BHLD = at::zeros_like(in.q_BHLD);
    const at::Tensor out = emulate(problem).results[0][0][1],
                     mean = in.v_BHSD[0][1].to(at::kDouble).mean(0, /*keepdim=*/true);
    EXPECT_LE((out.to(at::kDouble) - mean).abs().max().item<double>(), 0x1p-11);
  }
}

// NaN reaches the queries that see it.
TEST(EntmaxTiles, NaNReachesTheQueriesThatSeeIt) {
  constexpr std::int64_t kTokens = 150, kRow = 70;
  for (const RowNormalizer& normalizer : entmaxes()) {
    for (const std::size_t which : {0, 1}) {
      RowAttentionProblem problem =
          random_rows({kTokens, kTokens, 24, true}, normalizer, at::kBFloat16);
      const RowAttention& in = problem.attention;
      (which == 0 ? in.q_BHLD : in.k_BHSD).select(2, kRow).select(2, 5).fill_(NAN);
      const std::vector<at::Tensor> results = emulate(problem).results;
      const std::int64_t last = which == 0 ? kRow : kTokens - 1;
      for (const std::size_t i : {0, 1}) {  // out and d_q
        const at::Tensor seeing = results[i].narrow(2, kRow, last - kRow + 1);
        EXPECT_TRUE(seeing.isnan().all().item<bool>()) << which << " result " << i;
        EXPECT_TRUE(results[i].narrow(2, 0, kTileRows).isfinite().all().item<bool>()) << which;
      }
      EXPECT_TRUE(results[2].select(2, kRow).isnan().all().item<bool>());
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
