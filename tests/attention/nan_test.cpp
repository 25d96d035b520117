// The propagation of NaN: on every path to all results that see it, and on the CPU's fused path to
// nothing else. Legend: B batch, H heads, L queries, S keys, N blocks, b tokens of a block, D head
// dim.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// bool: which entries of dim `dim` hold NaN.
at::Tensor nan_rows(const at::Tensor& x, std::int64_t dim) {
  return x.detach().isnan().movedim(dim, 0).flatten(1).any(1);
}

enum class Input { kQ, kK, kV, kX };

// The same with another number in one place of sample 0, in the first head.
AttentionInput with_number(const AttentionInput& in, Input input, std::int64_t token,
                           double number) {
  AttentionInput changed = token_slice(in, 0, kTokens);
  const at::NoGradGuard no_grad;
  at::Tensor x = input == Input::kQ   ? changed.q_BHLD.detach()[0][0]
                 : input == Input::kK ? changed.k_BHSD.detach()[0][0]
                 : input == Input::kV ? changed.v_BHSD.detach()[0][0]
                                      : changed.x_q_BLC.detach()[0];
  x[token][0] = number;
  return changed;
}

// bool [L]: the queries of sample 0 and head 0 whose outputs depend on a number of the input.
at::Tensor reached(const Mechanism& mechanism, const AttentionInput& in, Input input,
                   std::int64_t token) {
  const at::NoGradGuard no_grad;
  const auto out = [&](double number) {
    return run(mechanism, with_number(in, input, token, number), Path::kReference)[0][0];
  };
  return ((out(0.5) - out(-2)).abs() > 1e-9).any(1);
}

class NaNConformance : public ::testing::TestWithParam<MechanismCase> {};
INSTANTIATE_TEST_SUITE_P(All, NaNConformance, ::testing::ValuesIn(all_cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(NaNConformance, ReachesWhatSeesItAndNoEarlierQuery) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const Built exact(GetParam().config, GetParam().causal, at::kDouble);
  const AttentionInput exact_in = random_input(kTokens, at::kDouble, 1, exact.traits);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const Built built(GetParam().config, GetParam().causal, dtype);
    const AttentionInput in = random_input(kTokens, dtype, 1, built.traits);
    for (const Input input : {Input::kQ, Input::kK, Input::kV, Input::kX}) {
      for (const std::int64_t token : {1, 6}) {
        at::Tensor must = reached(*exact.mechanism, exact_in, input, token);
        // A NaN may put a token into another cluster than the numbers of reached() do, perhaps one
        // where it reaches no key.
        if (exact.traits.clusters && input != Input::kV) {
          must = at::logical_and(must, at::arange(kTokens) == token);
          if (exact.traits.skips_queries) must.fill_(false);
        }
        for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
          const std::string what = std::string(c10::toString(dtype)) + " input " +
                                   std::to_string(static_cast<int>(input)) + " token " +
                                   std::to_string(token) + " path " +
                                   std::to_string(static_cast<int>(path));
          const AttentionInput nan_in = with_number(in, input, token, kNaN);
          const at::Tensor out = run(*built.mechanism, nan_in, path);
          const at::Tensor is_nan = nan_rows(out[0][0], 0);
          EXPECT_FALSE(at::logical_and(must, is_nan.logical_not()).any().item<bool>())
              << what << "\n"
              << must << is_nan;
          EXPECT_FALSE(out[1].isnan().any().item<bool>()) << what;
          // The gradient of a query that sees a NaN is NaN.
          const at::Tensor d_q =
              nan_rows(gradients(out, leaves(nan_in, built.parameters))[0][0][0], 0);
          EXPECT_FALSE(at::logical_and(must, d_q.logical_not()).any().item<bool>()) << what << "\n"
                                                                                    << must << d_q;
          if (path != Path::kFused || !built.traits.causal) continue;
          const at::Tensor finite =
              run(*built.mechanism, with_number(in, input, token, 0.5), path).narrow(2, 0, token);
          EXPECT_TRUE(at::equal(out.narrow(2, 0, token), finite)) << what;
        }
      }
    }
  }
}

// A block-attention problem of several tiles, with masks, a bias and dropout. NaN is what unwritten
// memory may hold: any payload.
struct BlockProblem {
  BlockAttention attention;
  at::Tensor d_out, mask_LS;
  std::vector<at::Tensor> leaves;  // q, k, v, bias

  BlockProblem(at::ScalarType dtype, bool causal, bool drops, bool masks) {
    constexpr std::int64_t kDocumentTokens = 100, D = 20;
    std::uint64_t seed = 0;
    const auto leaf = [&](at::IntArrayRef shape) {
      leaves.push_back(random_tensor(shape, at::kDouble, ++seed).to(dtype));
      return leaves.back();
    };
    attention.q_BHNbD = leaf({1, 2, 1, kDocumentTokens, D});
    KeyBlocks keys{.k_BHNbD = leaf({1, 2, 1, kDocumentTokens, D}),
                   .v_BHNbD = leaf({1, 2, 1, kDocumentTokens, D}),
                   .window = {.causal = causal},
                   .mask_BHNbb = {at::Tensor()},
                   .bias_BHNbb = leaf({1, 1, 1, kDocumentTokens, kDocumentTokens})};
    mask_LS = at::ones({kDocumentTokens, kDocumentTokens}, at::kBool);
    if (masks) {
      mask_LS = random_tensor({kDocumentTokens, kDocumentTokens}, at::kFloat, ++seed) > -1;
      mask_LS.select(1, 17).fill_(false);  // a key that no query sees
      mask_LS.select(0, 23).fill_(false);  // a query that sees no key
      keys.mask_BHNbb = {mask_LS.view({1, 1, 1, kDocumentTokens, kDocumentTokens})};
    }
    if (causal) mask_LS = mask_LS.tril();
    attention.keys = {keys};
    if (drops) {
      attention.dropout = 0.4f;
      attention.noise = NoiseKey{.seed = 3,
                                 .step = at::full({1}, 3, at::kLong),
                                 .layer = 2,
                                 .sample_ids_B = at::zeros({1}, at::kLong)};
    }
    d_out = random_tensor({1, 2, 1, kDocumentTokens, D}, at::kDouble, ++seed).to(dtype);
  }

  // Returns out, then the gradients of the leaves, with bytes `fill` in place of number 3 of `row`
  // of tensor `which` (4: d_out), in head 0.
  std::vector<at::Tensor> solve(std::size_t which, std::int64_t row, int fill) const {
    BlockAttention changed = attention;
    std::vector<at::Tensor> copies;
    for (const at::Tensor& x : leaves) copies.push_back(x.clone());
    const at::Tensor d = d_out.clone();
    const at::Tensor& target = which < copies.size() ? copies[which] : d;
    std::memset(target[0][0][0][row][3].mutable_data_ptr(), fill, target.itemsize());
    for (at::Tensor& x : copies) x.set_requires_grad(true);
    changed.q_BHNbD = copies[0];
    changed.keys[0].k_BHNbD = copies[1];
    changed.keys[0].v_BHNbD = copies[2];
    changed.keys[0].bias_BHNbb = copies[3];
    const at::Tensor out = attend_in_blocks(changed, Path::kFused);
    std::vector<at::Tensor> results = torch::autograd::grad({out}, copies, {d});
    results.insert(results.begin(), out.detach());
    return results;
  }
};

TEST(NaN, StaysWithQueriesThatSeeIt) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
      const BlockProblem problem(dtype, variant & 1, variant & 2, variant & 4);
      const at::Tensor& mask = problem.mask_LS;
      for (std::size_t which = 0; which < 5; ++which) {
        for (const std::int64_t row : {0, 17, 23, 70, 99}) {
          const std::string what = std::string(c10::toString(dtype)) + " variant " +
                                   std::to_string(variant) + " tensor " + std::to_string(which) +
                                   " row " + std::to_string(row);
          const auto nan = problem.solve(which, row, 0xff), finite = problem.solve(which, row, 0);
          // The queries that see it. For a bias of row `row`: key 3.
          at::Tensor sees = at::zeros({mask.size(0)}, at::kBool);
          if (which == 0 || which == 4) sees[row] = mask[row].any();
          if (which == 1 || which == 2) sees = mask.select(1, row);
          if (which == 3) sees[row] = mask[row][3];
          const at::Tensor out_sees = which == 4 ? at::zeros_like(sees) : sees;
          const at::Tensor keys = at::logical_and(mask, sees.unsqueeze(1)).any(0);
          const std::vector<at::Tensor> expected{out_sees, sees, keys,
                                                 which == 2 ? at::zeros_like(keys) : keys};
          for (std::size_t i = 0; i < expected.size(); ++i) {
            EXPECT_TRUE(at::equal(nan_rows(nan[i][0][0][0], 0), expected[i]))
                << what << " result " << i << nan_rows(nan[i][0][0][0], 0) << expected[i];
          }
          EXPECT_TRUE(at::equal(nan_rows(nan[4][0][0][0], 0), sees)) << what << " bias";
          for (std::size_t i = 0; i < nan.size(); ++i) {
            const at::Tensor hole = nan[i].isnan();
            EXPECT_TRUE(at::equal(nan[i].masked_fill(hole, 0), finite[i].masked_fill(hole, 0)))
                << what << " result " << i;
          }
        }
      }
    }
  }
}

// Block mixing: NaN of a source or of a gradient does not go to blocks whose weight for it is 0.
TEST(NaN, IsMixedIntoBlocksThatHaveAWeightForIt) {
  constexpr std::int64_t N = 11;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    at::Tensor weights =
        random_tensor({1, 1, N, N}, at::kFloat, 1).abs().add(0.1).tril(-1).to(dtype);
    weights[0][0][8][4] = 0;
    const at::Tensor x = random_tensor({1, 1, N, 2, 5}, at::kFloat, 2).to(dtype);
    const auto solve = [&](double in_x, double in_d) {
      at::Tensor w = weights.clone(), changed = x.clone(),
                 d = random_tensor(x.sizes(), at::kFloat, 3).to(dtype);
      changed[0][0][4][1][2] = in_x;
      d[0][0][8][1][2] = in_d;
      w.set_requires_grad(true);
      changed.set_requires_grad(true);
      const at::Tensor y = mix_lower_blocks(w, {changed}, -1, Path::kFused).y_BHNbD[0];
      const auto gradient = torch::autograd::grad({y}, {w, changed}, {d});
      return std::vector<at::Tensor>{y.detach(), gradient[0], gradient[1]};
    };
    const auto finite = solve(0, 0), nan = solve(NAN, NAN);
    at::Tensor y = at::zeros_like(nan[0], at::kBool), d_w = at::zeros_like(nan[1], at::kBool),
               d_x = y.clone();
    y[0][0].narrow(0, 5, N - 5).select(1, 1).select(1, 2).fill_(true);
    y[0][0][8] = false;
    d_w[0][0].select(1, 4).narrow(0, 5, N - 5).fill_(true);
    d_w[0][0][8].narrow(0, 0, 8).fill_(true);
    d_w[0][0][8][4] = false;
    d_x[0][0].narrow(0, 0, 8).select(1, 1).select(1, 2).fill_(true);
    d_x[0][0][4] = false;
    const std::vector<at::Tensor> expected{y, d_w, d_x};
    for (std::size_t i = 0; i < nan.size(); ++i) {
      EXPECT_TRUE(at::equal(nan[i].isnan(), expected[i])) << dtype << " result " << i;
      const at::Tensor hole = nan[i].isnan();
      if (i == 1) continue;  // its other entries are sums with the numbers that were changed
      EXPECT_TRUE(at::equal(nan[i].masked_fill(hole, 0), finite[i].masked_fill(hole, 0)))
          << dtype << " result " << i;
    }
  }
}

// A NaN score makes all weights of its matrix NaN. Prefixes that do not hold it keep their bits,
// and so do earlier rows in the cumulative balance.
TEST(NaN, OfAScoreMakesItsBalanceNaN) {
  constexpr std::int64_t N = 9, kRow = 5;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const Path path : {Path::kReference, Path::kFused}) {
      at::Tensor scores = random_tensor({2, N, N}, dtype, 1);
      const auto masked = [](const at::Tensor& x) {
        return x.masked_fill(at::ones({N, N}, at::kBool).triu(), -HUGE_VAL);
      };
      at::Tensor with_nan = scores.clone();
      with_nan[0][kRow][2] = NAN;
      const at::Tensor whole = balance(with_nan, 3, path);
      EXPECT_TRUE(whole[0].isnan().all().item<bool>());
      EXPECT_TRUE(at::equal(whole[1], balance(scores, 3, path)[1]));
      for (const bool cumulative : {false, true}) {
        const auto solve = [&](const at::Tensor& x) {
          return cumulative ? cumulative_balance(masked(x), 3, path)
                            : prefix_balance(masked(x), 3, 0, path);
        };
        const at::Tensor p = solve(with_nan), finite = solve(scores);
        EXPECT_TRUE(at::equal(p[0].narrow(0, 0, kRow), finite[0].narrow(0, 0, kRow)))
            << cumulative << dtype;
        EXPECT_TRUE(at::equal(p[1], finite[1]));
        for (std::int64_t u = kRow; u < N; ++u) {
          EXPECT_TRUE(p[0][u].narrow(0, 0, u).isnan().any().item<bool>()) << cumulative << u;
        }
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
