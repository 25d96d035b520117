// The GPU kernels of the Sinkhorn operator, tested without a GPU: against the specification in
// fp64, they must be as exact as the specification in fp32. Legend: N blocks, R rows, C columns.
#include "tests/attention/kernels/sinkhorn/balance_emulated.h"

#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

constexpr int kSm90 = 232448;
constexpr BalanceKind kWhole = BalanceKind::kWhole, kPrefix = BalanceKind::kPrefix,
                      kCumulative = BalanceKind::kCumulative;

struct Case {
  std::string name;
  at::Tensor scores;  // [matrices, R, C] fp32
  BalanceKind kind;
  int first_row = 0, iterations = 5, shared_limit = kSm90;
};

struct Result {
  at::Tensor p, d_scores;
  at::Tensor rounded{};  // of whole matrices: [matrices, R, C rounded up to a multiple of 8]
};

Result specified(const Case& c, at::ScalarType dtype, const at::Tensor& d_p) {
  const at::Tensor leaf = c.scores.to(dtype).detach().requires_grad_(true);
  const at::Tensor p =
      c.kind == kPrefix  ? prefix_balance(leaf, c.iterations, c.first_row, Path::kReference)
      : c.kind == kWhole ? balance(leaf, c.iterations, Path::kReference)
                         : cumulative_balance(leaf, c.iterations, Path::kReference);
  p.backward(d_p.to(dtype));
  return {p.detach(), leaf.grad()};
}

Result emulated(const Case& c, const at::Tensor& d_p, at::ScalarType rounded = at::kBFloat16) {
  Result result{at::full(d_p.sizes(), NAN, d_p.options()), at::full_like(c.scores, NAN)};
  const int rows = static_cast<int>(c.scores.size(1));
  if (c.kind == kWhole) {
    const std::int64_t width = BalanceParams::rounded_columns(static_cast<int>(c.scores.size(2)));
    result.rounded = at::full({c.scores.size(0), rows, width}, NAN, rounded);
  }
  BalanceParams params{
      .matrices = c.scores.size(0),
      .rows = rows,
      .columns = static_cast<int>(c.scores.size(2)),
      .iterations = c.iterations,
      .kind = c.kind,
      .first_row = c.first_row,
      .results = c.kind == kPrefix ? rows - c.first_row : 1,
      .scores = c.scores.const_data_ptr<float>(),
      .p = result.p.mutable_data_ptr<float>(),
      .rounded = c.kind == kWhole ? result.rounded.mutable_data_ptr() : nullptr,
      .rounded_dtype = rounded == at::kHalf ? KernelDtype::kHalf : KernelDtype::kBFloat16,
      .scratch = nullptr};
  const at::Tensor scratch = at::full({params.matrices, params.scratch_per_matrix()}, NAN);
  params.scratch = scratch.mutable_data_ptr<float>();
  emulate_balance(params, c.shared_limit);
  const at::Tensor vectors =
      at::full({params.matrices, BalanceBackwardParams::vectors_per_matrix(params)}, NAN);
  emulate_balance_backward({.problems = params,
                            .d_p = d_p.const_data_ptr<float>(),
                            .vectors = vectors.mutable_data_ptr<float>(),
                            .d_scores = result.d_scores.mutable_data_ptr<float>()},
                           c.shared_limit);
  return result;
}

at::Tensor d_p_of(const Case& c) {
  return random_tensor({c.scores.size(0), c.scores.size(1) - c.first_row, c.scores.size(2)},
                       at::kFloat, 5);
}

// `rounded` is P, then zeros.
void expect_rounded(const Result& result, const std::string& name) {
  const std::int64_t columns = result.p.size(2), width = result.rounded.size(2);
  expect_same_bits(result.rounded.narrow(2, 0, columns), result.p.to(result.rounded.scalar_type()),
                   name + ", P rounded");
  expect_same_bits(
      result.rounded.narrow(2, columns, width - columns),
      at::zeros({result.p.size(0), result.p.size(1), width - columns}, result.rounded.options()),
      name + ", beyond the last column");
}

void check(const Case& c) {
  const at::Tensor d_p = d_p_of(c);
  const Result kernel = emulated(c, d_p), reference = specified(c, at::kFloat, d_p),
               exact = specified(c, at::kDouble, d_p);
  expect_as_exact(kernel.p, reference.p, exact.p, c.name + ", P");
  expect_as_exact(kernel.d_scores, reference.d_scores, exact.d_scores, c.name + ", gradient");
  if (c.kind == kWhole) expect_rounded(kernel, c.name);
}

at::Tensor scores(at::IntArrayRef shape, double scale = 1) {
  return random_tensor(shape, at::kFloat, 3) * scale;
}

class EmulatedBalanceKernel : public ::testing::Test {
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer does not know fibers, and there is one thread";
#endif
  }
};

TEST_F(EmulatedBalanceKernel, GivesTheSameBitsASecondTime) {
  for (const BalanceKind kind : {kWhole, kPrefix}) {
    for (const std::int64_t N : {6, 33}) {
      const Case c{fmt::format("N {} kind {}", N, static_cast<int>(kind)),
                   scores({2, N, N}, N < 10 ? 20 : 5), kind};
      const Result first = emulated(c, d_p_of(c)), second = emulated(c, d_p_of(c));
      expect_same_bits(first.p, second.p, c.name);
      expect_same_bits(first.d_scores, second.d_scores, c.name + ", gradient");
    }
  }
}

TEST_F(EmulatedBalanceKernel, IsAsExactAsTheSpecification) {
  for (const std::int64_t N : {1, 2, 5, 33}) {
    for (const BalanceKind kind : {kWhole, kPrefix}) {
      check({fmt::format("N {} kind {}", N, static_cast<int>(kind)), scores({2, N, N}), kind});
      check({fmt::format("one iteration, N {} kind {}", N, static_cast<int>(kind)),
             scores({1, N, N}), kind, 0, 1});
    }
  }
  check({"not square", scores({1, 3, 40}), kWhole});
  check({"not square", scores({1, 40, 3}), kWhole});
  check({"last prefixes", scores({1, 36, 36}), kPrefix, 33, 2});
  check({"no prefix", scores({1, 4, 4}), kPrefix, 4});
}

// Around each border between the sizes that the kernels for small matrices have.
TEST_F(EmulatedBalanceKernel, SmallMatricesOfEachSize) {
  for (const std::int64_t N : {8, 15, 16, 17, 31, 32, 63, 64, 65}) {
    check({fmt::format("N {}", N), scores({3, N, N}), kWhole});
  }
  for (const std::int64_t N : {126, 127, 128, 129}) {
    check({fmt::format("N {}", N), scores({1, N, N}), kWhole, 0, 2});
  }
  check({"many columns", scores({1, 3, 128}), kWhole});
  check({"many rows", scores({1, 128, 3}), kWhole});
  for (int iterations = 1; iterations <= 8; ++iterations) {
    check({fmt::format("{} iterations", iterations), scores({1, 12, 12}), kWhole, 0, iterations});
  }
  check({"vectors that shared memory does not hold", scores({1, 20, 20}), kWhole, 0, 7, 8000});
}

// Matrices whose rows are not aligned to 16 bytes although their length is.
TEST_F(EmulatedBalanceKernel, SmallMatricesThatAreNotAligned) {
  const at::Tensor all = scores({2 * 8 * 8 + 1});
  check({"not aligned", all.narrow(0, 1, 2 * 8 * 8).view({2, 8, 8}), kWhole});
}

TEST_F(EmulatedBalanceKernel, RoundsToHalf) {
  for (const std::int64_t N : {7, 16, 140}) {
    const Case c{fmt::format("N {}", N), scores({2, N, N}), kWhole, 0, 2};
    expect_rounded(emulated(c, d_p_of(c), at::kHalf), c.name);
  }
}

// Scores and sums around the limits of the ordinary domain: one matrix leaves it, the other does
// not.
TEST_F(EmulatedBalanceKernel, SmallMatricesOutOfRange) {
  const Case without{"all in range", scores({2, 20, 20}), kWhole};
  const Result ordinary = emulated(without, d_p_of(without));
  for (const float large : {49.0f, 51.0f, -51.0f, 60.0f, 1e5f, -1e5f}) {
    Case c = without;
    c.name = fmt::format("{} in row 7, column 11", large);
    c.scores = c.scores.clone();
    c.scores[0][7][11] = large;
    check(c);
    const Result result = emulated(c, d_p_of(c));
    expect_same_bits(result.p[1], ordinary.p[1], c.name);
    expect_same_bits(result.d_scores[1], ordinary.d_scores[1], c.name);
  }
  for (const double scale : {5.0, 10.0, 15.0, 20.0, 45.0}) {
    for (const std::int64_t N : {40, 70}) {
      check({fmt::format("scale {} N {}", scale, N), scores({1, N, N}, scale), kWhole, 0, 3});
    }
  }
  check({"a common offset", scores({1, 20, 20}) + 1000, kWhole});
  // Each iteration multiplies the sums by 1 / 40.
  check({"sums out of range", scores({1, 1, 40}), kWhole, 0, 20});
}

TEST_F(EmulatedBalanceKernel, EachNumberOfColumnsAndPlaceOfTheScores) {
  check({"256 columns", scores({1, 9, 250}), kWhole, 0, 2});
  check({"256 columns, scores in memory", scores({1, 17, 250}), kWhole, 0, 2, 20000});
}

// Around each border between block and tile shapes.
TEST_F(EmulatedBalanceKernel, PrefixesOfEachShape) {
  for (const std::int64_t N : {1, 2, 15, 16, 17, 31, 32, 63, 64, 65}) {
    check({fmt::format("N {}", N), scores({2, N, N}), kPrefix});
  }
  // A card computes the larger ones (balance_gpu_test.cpp).
  for (const int N : {96, 97, 129}) {
    check({fmt::format("last of N {}", N), scores({1, N, N}), kPrefix, N - 3, 2});
  }
  check({"from the first on", scores({1, 66, 66}), kPrefix, 0, 2});
  check({"some of 64", scores({1, 64, 64}), kPrefix, 50});
  for (int iterations = 1; iterations <= 8; ++iterations) {
    check({fmt::format("{} iterations", iterations), scores({1, 20, 20}), kPrefix, 3, iterations});
  }
  check({"20 iterations", scores({1, 65, 65}), kPrefix, 62, 20});
}

// A NaN score makes its matrix NaN, or the prefixes that hold it, and no other.
TEST_F(EmulatedBalanceKernel, NaNIsNotHidden) {
  for (const BalanceKind kind : {kWhole, kPrefix}) {
    Case c{"NaN", scores({2, 9, 9}), kind};
    const at::Tensor d_p = d_p_of(c);
    const Result finite = emulated(c, d_p);
    c.scores[0][5][2] = NAN;
    const Result result = emulated(c, d_p);
    EXPECT_TRUE(at::equal(result.p[1], finite.p[1]));
    EXPECT_TRUE(at::equal(result.d_scores[1], finite.d_scores[1]));
    const std::int64_t first = kind == kPrefix ? 5 : 0;
    EXPECT_TRUE(at::equal(result.p[0].narrow(0, 0, first), finite.p[0].narrow(0, 0, first)));
    for (std::int64_t r = first; r < 9; ++r) {
      EXPECT_TRUE(result.p[0][r].narrow(0, 0, kind == kPrefix ? r : 9).isnan().all().item<bool>())
          << r;
    }
    EXPECT_TRUE(result.d_scores[0].isnan().any().item<bool>());
  }
}

// Scores of any size: problems that leave the number range are solved in the log domain.
TEST_F(EmulatedBalanceKernel, LargeScores) {
  for (const double scale : {30.0, 200.0, 1e4}) {
    for (const BalanceKind kind : {kWhole, kPrefix}) {
      check({fmt::format("scale {} kind {}", scale, static_cast<int>(kind)),
             scores({2, 6, 6}, scale), kind});
    }
  }
  for (const double scale : {5.0, 10.0, 15.0, 20.0, 45.0}) {
    check({fmt::format("prefixes, scale {}", scale), scores({2, 6, 6}, scale), kPrefix});
    check(
        {fmt::format("prefixes, scale {}, N 40", scale), scores({1, 40, 40}, scale), kPrefix, 36});
  }
  check({"prefixes, scale 20, N 70", scores({1, 70, 70}, 20), kPrefix, 68, 3});
}

// One score out of range: the prefixes that hold it are solved in the log domain, the others are
// not.
TEST_F(EmulatedBalanceKernel, AScoreOutOfRange) {
  for (const std::int64_t N : {20, 70}) {
    // Some prefixes with the large score and, of N 20, some without.
    const int first_row = N == 20 ? 4 : 66;
    const Case without{"all in range", scores({1, N, N}), kPrefix, first_row, 2};
    const Result ordinary = emulated(without, d_p_of(without));
    for (const float large : {60.0f, -60.0f, 1e5f}) {
      if (N > 20 && large != 60) continue;  // to save time
      Case c = without;
      c.name = fmt::format("N {}, {} in row 7, column 11", N, large);
      c.scores = c.scores.clone();
      c.scores[0][7][11] = large;
      check(c);
      if (N > 20) continue;
      const Result result = emulated(c, d_p_of(c));
      expect_same_bits(result.p.narrow(1, 0, 8), ordinary.p.narrow(1, 0, 8), c.name);
    }
  }
  Case offset{"a common offset", scores({1, 20, 20}) + 1000, kPrefix};
  check(offset);
}

// Sums out of range although each score is in range.
TEST_F(EmulatedBalanceKernel, SumsOutOfRange) {
  for (const int N : {24, 72}) {
    at::Tensor far = scores({1, N, N});
    far.narrow(2, 0, N / 2) += 45;
    far.narrow(2, N / 2, N / 2) -= 45;
    far.narrow(1, 6, 6).narrow(2, 3, 4).neg_();
    far.select(1, N - 4) = 45;
    far.select(1, N - 3) = -45;
    check({fmt::format("far apart, N {}", N), far, kPrefix, N - 24});
  }
}

TEST_F(EmulatedBalanceKernel, FutureScoresChangeNoBit) {
  for (const std::int64_t N : {40, 70}) {
    const Case c{fmt::format("N {}", N), scores({1, N, N}), kPrefix, 0, 2};
    const at::Tensor d_p = d_p_of(c);
    const Result before = emulated(c, d_p);
    for (const float later : {0.5f, 49.0f, -1e3f, -INFINITY}) {
      for (const std::int64_t u : {std::int64_t{17}, N - 5}) {
        if (later == -1e3f && u < N - 5) continue;  // the log domain is slow here
        Case changed = c;
        changed.scores = c.scores.clone();
        changed.scores.narrow(1, u + 1, N - u - 1).fill_(later);
        changed.scores.narrow(2, u, N - u).fill_(later);
        const Result after = emulated(changed, d_p);
        expect_same_bits(after.p.narrow(1, 0, u + 1), before.p.narrow(1, 0, u + 1),
                         fmt::format("N {} u {} later {}", N, u, later));
      }
    }
    expect_same_bits(emulated(c, d_p).d_scores, before.d_scores, c.name + ", a second time");
  }
}

// The first row of a call does not change a bit of the prefixes that the call has.
TEST_F(EmulatedBalanceKernel, TheFirstRowChangesNoBit) {
  for (const int N : {50, 70}) {
    Case c{fmt::format("N {} from 0", N), scores({2, N, N}), kPrefix, 0, 3};
    const at::Tensor all = emulated(c, d_p_of(c)).p;
    for (const int first_row : {1, 15, 16, 40, N - 1}) {
      c.first_row = first_row;
      expect_same_bits(emulated(c, d_p_of(c)).p, all.narrow(1, first_row, N - first_row),
                       fmt::format("N {} from {}", N, first_row));
    }
  }
}

TEST_F(EmulatedBalanceKernel, EmptyRowsAndColumnsAndTriangles) {
  constexpr double kBarred = -std::numeric_limits<double>::infinity();
  at::Tensor empty = scores({1, 6, 6});
  empty.select(1, 2).fill_(kBarred);
  empty.select(2, 4).fill_(kBarred);
  const at::Tensor triangle =
      scores({1, 6, 6}).masked_fill(at::ones({6, 6}, at::kBool).triu(1), kBarred);
  for (const BalanceKind kind : {kWhole, kPrefix}) {
    check({"empty row and column", empty, kind});
    check({"triangle", triangle, kind});
    check({"nothing", at::full({1, 3, 3}, kBarred), kind});
  }
  // Documents: blocks see only those of their own document.
  at::Tensor documents = at::full({1, 70, 70}, kBarred);
  for (const std::int64_t begin : {0, 20, 21, 50}) {
    const std::int64_t size = begin == 20 ? 1 : std::min<std::int64_t>(70 - begin, 29);
    documents.narrow(1, begin, size).narrow(2, begin, size).copy_(scores({1, size, size}, 5));
  }
  check({"documents", documents, kPrefix});
}

// ---- The cumulative balance.

// Sources come before destinations.
Case cumulative(std::int64_t matrices, std::int64_t N, double scale = 1, int iterations = 5) {
  const at::Tensor later = at::ones({N, N}, at::kBool).triu();
  return {fmt::format("cumulative, N {} scale {} iterations {}", N, scale, iterations),
          scores({matrices, N, N}, scale).masked_fill(later, -INFINITY), kCumulative, 0,
          iterations};
}

TEST_F(EmulatedBalanceKernel, CumulativeIsAsExactAsTheSpecification) {
  for (const std::int64_t N : {1, 2, 9, 31, 32, 33, 64, 65}) check(cumulative(2, N));
  for (int iterations = 1; iterations <= 8; ++iterations) check(cumulative(1, 12, 3, iterations));
  check(cumulative(1, 10, 1, BalanceParams::kMaxCumulativeIterations));
  for (const double scale : {5.0, 20.0, 45.0, 200.0, 1e4}) {
    check(cumulative(2, 6, scale));
    check(cumulative(1, 40, scale, 3));
  }
}

TEST_F(EmulatedBalanceKernel, CumulativeWithMaskedPairs) {
  Case c = cumulative(1, 20, 5);
  c.scores[0].select(0, 12).fill_(-INFINITY);
  c.scores[0].select(1, 3).fill_(-INFINITY);
  // A document that begins at block 8.
  c.scores[0].narrow(0, 8, 12).narrow(1, 0, 8).fill_(-INFINITY);
  c.name = "cumulative, masked pairs";
  check(c);
}

TEST_F(EmulatedBalanceKernel, CumulativeRowsDoNotDependOnLaterOnes) {
  for (const std::int64_t N : {20, 70}) {
    const Case c = cumulative(1, N, 2, 3);
    const at::Tensor d_p = d_p_of(c);
    const Result before = emulated(c, d_p);
    for (const float later : {0.5f, 1e3f, NAN}) {
      Case changed = c;
      changed.scores = c.scores.clone();
      changed.scores[0][15].narrow(0, 0, 15).fill_(later);
      const Result after = emulated(changed, d_p);
      expect_same_bits(after.p.narrow(1, 0, 15), before.p.narrow(1, 0, 15), c.name);
      EXPECT_FALSE(at::equal(after.p[0][15], before.p[0][15]));
      if (!std::isnan(later)) continue;
      for (std::int64_t u = 15; u < N; ++u) {
        EXPECT_TRUE(after.p[0][u].narrow(0, 0, 15).isnan().all().item<bool>()) << u;
      }
      EXPECT_TRUE(after.d_scores.isnan().any().item<bool>());
    }
    const Result again = emulated(c, d_p);
    expect_same_bits(again.p, before.p, c.name);
    expect_same_bits(again.d_scores, before.d_scores, c.name + ", gradient");
  }
}

}  // namespace
}  // namespace birkhoff::test
