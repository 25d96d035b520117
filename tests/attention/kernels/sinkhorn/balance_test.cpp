// The Sinkhorn operator and its causal forms.
// Legend: S scores, P weights, N blocks.
#include "attention/kernels/sinkhorn/sinkhorn.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr double kBarred = -std::numeric_limits<double>::infinity();
constexpr Path kPaths[] = {Path::kReference, Path::kFused};

using Operator = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor random_scores(std::int64_t size, std::uint64_t seed, double scale = 1) {
  return random_tensor({2, size, size}, at::kDouble, seed) * scale;
}

// Scores masked on and above the diagonal, as in causal use.
at::Tensor strictly_past(const at::Tensor& scores) {
  const std::int64_t N = scores.size(-1);
  return scores.masked_fill(at::ones({N, N}, at::kBool).triu(), kBarred);
}

// Normalization as in the paper, without logarithms.
at::Tensor naive_balance(const at::Tensor& scores, int iterations) {
  at::Tensor p = scores.exp();
  for (int i = 0; i < iterations; ++i) {
    p = p / p.sum(-2, true);
    p = p / p.sum(-1, true);
  }
  return p;
}

// Checks every entry's derivative against a central difference; masked entries must get 0.
void expect_gradient(const Operator& op, const at::Tensor& scores) {
  const at::Tensor leaf = scores.clone().set_requires_grad(true);
  const at::Tensor out = op(leaf);
  const at::Tensor d = gradients(out, {leaf}, 11)[0];
  const at::Tensor weights = random_tensor(out.sizes(), at::kDouble, 11);
  at::NoGradGuard no_grad;
  at::Tensor numeric = at::zeros_like(scores), flat = leaf.view(-1);
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const double value = flat[i].item<double>();
    if (value == kBarred) continue;
    const double step = 1e-6;
    flat[i] = value + step;
    const double above = (op(leaf) * weights).sum().item<double>();
    flat[i] = value - step;
    const double below = (op(leaf) * weights).sum().item<double>();
    flat[i] = value;
    numeric.view(-1)[i] = (above - below) / (2 * step);
  }
  EXPECT_LE(max_difference(d, numeric), 1e-8);
}

struct MemoryGauge final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    now += size;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t now = 0, peak = 0;
};

// The peak memory of the tensors that an operator and its gradient create, in units of the size of
// `scores` [N, N].
double peak_matrices(const Operator& op, const at::Tensor& scores) {
  const at::Tensor leaf = scores.clone().set_requires_grad(true);
  const auto gauge = std::make_shared<MemoryGauge>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, gauge);
    op(leaf).sum().backward();
  }
  return static_cast<double>(gauge->peak) / static_cast<double>(scores.nbytes());
}

TEST(Balance, LogDomainEqualsThePaperAtMildScores) {
  const at::Tensor s = random_scores(6, 1);
  for (const Path path : kPaths) {
    for (const int iterations : {1, 2, 5}) {
      EXPECT_LE(max_difference(balance(s, iterations, path), naive_balance(s, iterations)), 1e-14);
    }
  }
}

TEST(Balance, RowsAreExactAndColumnsApproach) {
  const at::Tensor s = random_scores(7, 2, 2);
  for (const Path path : kPaths) {
    double error = std::numeric_limits<double>::infinity();
    for (int iterations = 1; iterations <= 60; ++iterations) {
      const at::Tensor p = balance(s, iterations, path);
      EXPECT_GE(p.min().item<double>(), 0);
      EXPECT_LE((p.sum(-1) - 1).abs().max().item<double>(), 1e-13);
      const double now = (p.sum(-2) - 1).abs().sum(-1).max().item<double>();
      EXPECT_LE(now, error + 1e-13);
      error = now;
    }
    EXPECT_LE(error, 1e-6);
  }
}

TEST(Balance, ZeroScoresGiveTheMean) {
  for (const Path path : kPaths) {
    const at::Tensor p = balance(at::zeros({1, 5, 5}, at::kDouble), 3, path);
    EXPECT_LE((p - 0.2).abs().max().item<double>(), 1e-15);
  }
}

TEST(Balance, PermutationsShiftsAndTransposition) {
  const at::Tensor s = random_scores(5, 3);
  const at::Tensor order = at::tensor({3, 0, 4, 1, 2}, at::kLong);
  for (const Path path : kPaths) {
    const at::Tensor p = balance(s, 4, path);
    const at::Tensor permuted = balance(s.index_select(1, order).index_select(2, order), 4, path);
    EXPECT_LE(max_difference(permuted, p.index_select(1, order).index_select(2, order)), 1e-14);
    // The first column step absorbs a column shift. After convergence, rows and columns may be
    // shifted.
    const at::Tensor shift = random_tensor({2, 1, 5}, at::kDouble, 4);
    EXPECT_LE(max_difference(balance(s + shift, 4, path), p), 1e-14);
    const at::Tensor converged = balance(s, 400, path);
    EXPECT_LE(max_difference(balance(s + shift + shift.transpose(1, 2), 400, path), converged),
              1e-12);
    EXPECT_LE(max_difference(balance(s.transpose(1, 2), 400, path), converged.transpose(1, 2)),
              1e-12);
  }
}

TEST(Balance, ColdScoresApproachTheBestAssignment) {
  const at::Tensor s = random_scores(5, 5)[0];
  std::vector<std::int64_t> order(5), best;
  std::iota(order.begin(), order.end(), 0);
  double best_value = kBarred;
  do {
    double value = 0;
    for (std::int64_t i = 0; i < 5; ++i) value += s[i][order[i]].item<double>();
    if (value > best_value) best_value = value, best = order;
  } while (std::next_permutation(order.begin(), order.end()));
  for (const Path path : kPaths) {
    const at::Tensor p = balance(s / 0.01, 2000, path);
    for (std::int64_t i = 0; i < 5; ++i) EXPECT_GT(p[i][best[i]].item<double>(), 0.99);
  }
}

TEST(Balance, GradientsEqualFiniteDifferences) {
  at::Tensor masked = random_scores(5, 6);
  masked[0].masked_fill_(at::ones({5, 5}, at::kBool).triu(1), kBarred);  // triangle
  masked[1][2].fill_(kBarred);                                           // no row, no column
  masked[1].select(1, 4).fill_(kBarred);
  for (const Path path : kPaths) {
    for (const int iterations : {1, 2, 3, 8}) {
      expect_gradient([&](const at::Tensor& s) { return balance(s, iterations, path); },
                      random_scores(4, 7));
      expect_gradient([&](const at::Tensor& s) { return balance(s, iterations, path); }, masked);
      expect_gradient([&](const at::Tensor& s) { return prefix_balance(s, iterations, 0, path); },
                      random_scores(5, 8));
      expect_gradient([&](const at::Tensor& s) { return prefix_balance(s, iterations, 2, path); },
                      masked);
      expect_gradient([&](const at::Tensor& s) { return cumulative_balance(s, iterations, path); },
                      strictly_past(random_scores(5, 9)));
    }
  }
  expect_gradient([](const at::Tensor& s) { return softmax_with_null(s); },
                  strictly_past(random_scores(5, 9)));
}

TEST(Balance, ConvergedGradientsIgnoreShifts) {
  const at::Tensor leaf = random_scores(5, 10).set_requires_grad(true);
  for (const Path path : kPaths) {
    const at::Tensor d = gradients(balance(leaf, 300, path), {leaf})[0];
    EXPECT_GT(d.abs().max().item<double>(), 1e-3);
    EXPECT_LE(d.sum(-1).abs().max().item<double>(), 1e-12);
    EXPECT_LE(d.sum(-2).abs().max().item<double>(), 1e-12);
  }
}

TEST(Balance, EmptyRowsAndColumnsAreZero) {
  at::Tensor s = random_scores(4, 12);
  s.select(1, 1).fill_(kBarred);
  s.select(2, 3).fill_(kBarred);
  for (const Path path : kPaths) {
    const at::Tensor p = balance(s, 5, path);
    EXPECT_EQ(p.select(1, 1).abs().max().item<double>(), 0);
    EXPECT_EQ(p.select(2, 3).abs().max().item<double>(), 0);
    EXPECT_LE((p.select(1, 0).sum(-1) - 1).abs().max().item<double>(), 1e-14);
    const at::Tensor nothing = balance(at::full({3, 3}, kBarred, at::kDouble), 5, path);
    EXPECT_EQ(nothing.abs().max().item<double>(), 0);
  }
}

// Scores of any size: prefixes that leave the kernel's number range are solved in the log domain,
// each on its own. The results agree where both methods apply.
TEST(Balance, KernelEqualsReferenceAtEveryScale) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double scale : {0.1, 1.0, 8.0, 30.0, 200.0, 1e4}) {
      const at::Tensor leaf =
          random_scores(9, 13, scale).to(dtype).detach().set_requires_grad(true);
      const double tolerance =
          (dtype == at::kFloat ? 3e-7 : 1e-15) * std::max(8.0, 4 * scale);  // of S + f + g
      for (const bool prefix : {false, true}) {
        const auto solve = [&](Path path) {
          return prefix ? prefix_balance(leaf, 5, 0, path) : balance(leaf, 5, path);
        };
        const at::Tensor fused = solve(Path::kFused), reference = solve(Path::kReference);
        EXPECT_LE(max_difference(fused, reference), tolerance) << scale << " " << dtype;
        const at::Tensor d_fused = gradients(fused, {leaf})[0];
        const at::Tensor d_reference = gradients(reference, {leaf})[0];
        EXPECT_TRUE(d_fused.isfinite().all().item<bool>());
        EXPECT_LE(max_difference(d_fused, d_reference), 10 * tolerance) << scale << " " << dtype;
      }
    }
  }
}

// fp32 against fp64, over random sizes and scales: the error of weights and of gradients is at most
// twice that of the reference plus two roundings of the largest value.
TEST(Balance, KernelErrorIsAtMostTwiceTheReferences) {
  struct Solver {
    std::string name;
    std::function<at::Tensor(const at::Tensor&, Path)> solve;
    bool causal = false;
  };
  const std::vector<Solver> solvers = {
      {"full", [](const auto& scores, auto path) { return balance(scores, 5, path); }},
      {"prefix", [](const auto& scores, auto path) { return prefix_balance(scores, 5, 0, path); }},
      {"cumulative",
       [](const auto& scores, auto path) { return cumulative_balance(scores, 5, path); }, true},
  };
  const auto check = [](const Solver& solver, std::int64_t size, double scale, std::uint64_t seed) {
    at::Tensor scores = random_scores(size, seed, scale).to(at::kFloat);
    if (solver.causal) scores = strictly_past(scores);
    const at::Tensor d_p = random_tensor(scores.sizes(), at::kFloat, seed + 1);
    const auto results = [&](at::ScalarType dtype, Path path) {
      const at::Tensor leaf = scores.to(dtype).detach().set_requires_grad(true);
      const at::Tensor p = solver.solve(leaf, path);
      return std::array{p.detach(), torch::autograd::grad({p}, {leaf}, {d_p.to(dtype)})[0]};
    };
    const auto exact = results(at::kDouble, Path::kReference),
               reference = results(at::kFloat, Path::kReference),
               fused = results(at::kFloat, Path::kFused);
    for (std::size_t i = 0; i < 2; ++i) {
      // Gradients that should be exactly 0 are rounding errors in fp64.
      const double bound = 2 * max_difference(reference[i], exact[i]) +
                           0x1p-22 * exact[i].abs().max().item<double>() + 0x1p-50;
      EXPECT_LE(max_difference(fused[i], exact[i]), bound)
          << solver.name << (i == 0 ? " weights" : " gradient") << ", size " << size << ", scale "
          << scale << ", seed " << seed;
    }
  };
  for (const Solver& solver : solvers) {
    for (const std::int64_t size : {1, 2, 3, 4, 5, 7, 9, 16, 33, 50, 64}) {
      for (const double scale : {0.1, 1.0, 4.0, 12.0}) {
        const std::uint64_t num_seeds = size < 10 ? 10 : 2;
        for (std::uint64_t seed = 0; seed < num_seeds; ++seed) check(solver, size, scale, seed);
      }
    }
  }
}

// A matrix out of the kernel's range is solved in the log domain. The other matrices of its call
// keep their bits, and so do prefixes that end before the out-of-range scores.
TEST(Balance, AMatrixOutOfRangeLeavesTheOthersAlone) {
  const at::Tensor mild = random_tensor({2, 3, 7, 7}, at::kFloat, 21);
  at::Tensor mixed = mild.clone();
  mixed[1][0][6].mul_(1e3);
  for (const bool prefix : {false, true}) {
    const auto solve = [&](const at::Tensor& scores, Path path) {
      const at::Tensor leaf = scores.clone().set_requires_grad(true);
      const at::Tensor p = prefix ? prefix_balance(leaf, 5, 0, path) : balance(leaf, 5, path);
      return std::pair(p.detach(), gradients(p, {leaf})[0]);
    };
    const auto [p, d] = solve(mixed, Path::kFused);
    const auto [p_mild, d_mild] = solve(mild, Path::kFused);
    const auto [p_reference, d_reference] = solve(mixed, Path::kReference);
    EXPECT_LE(max_difference(p, p_reference), 1e-6);
    EXPECT_LE(max_difference(d, d_reference), 1e-5);
    EXPECT_GT(max_difference(p[1][0], p_mild[1][0]), 1e-2);
    for (std::int64_t i = 0; i < 6; ++i) {
      if (i == 3) continue;  // [1][0]
      EXPECT_TRUE(at::equal(p[i / 3][i % 3], p_mild[i / 3][i % 3])) << i;
      EXPECT_TRUE(at::equal(d[i / 3][i % 3], d_mild[i / 3][i % 3])) << i;
    }
    if (prefix) {
      EXPECT_TRUE(at::equal(p[1][0].narrow(0, 0, 6), p_mild[1][0].narrow(0, 0, 6)));
    }
  }
}

TEST(Balance, MemoryDoesNotGrowWithTheNumberOfPrefixes) {
  const auto out_of_range = [](std::int64_t size) { return random_scores(size, 22, 1e4)[0]; };
  const Operator prefix = [](const at::Tensor& s) { return prefix_balance(s, 2, 0, Path::kFused); };
  const Operator cumulative = [](const at::Tensor& s) {
    return cumulative_balance(s, 2, Path::kFused);
  };
  for (const std::int64_t size : {24, 72}) {
    EXPECT_LE(peak_matrices(prefix, out_of_range(size)), 16) << size;
    EXPECT_LE(peak_matrices(cumulative, strictly_past(random_scores(size, 23)[0])), 16) << size;
  }
}

TEST(PrefixBalance, RowsAreThoseOfStandaloneMatrices) {
  const at::Tensor s = random_scores(7, 14, 2);
  for (const Path path : kPaths) {
    const at::Tensor p = prefix_balance(s, 5, 0, path);
    EXPECT_EQ(p.select(1, 0).abs().max().item<double>(), 0);
    for (std::int64_t u = 1; u < 7; ++u) {
      const at::Tensor alone = balance(s.narrow(1, 1, u).narrow(2, 0, u), 5, path);
      EXPECT_LE(max_difference(p.select(1, u).narrow(1, 0, u), alone.select(1, u - 1)), 1e-14);
      EXPECT_EQ(p.select(1, u).narrow(1, u, 7 - u).abs().max().item<double>(), 0);
    }
    EXPECT_TRUE(at::equal(prefix_balance(s, 5, 4, path), p.narrow(1, 4, 3)));
  }
}

// Row u does not change by a bit when later rows, or columns from u on, change.
TEST(PrefixBalance, LaterScoresDoNotChangeABit) {
  const at::Tensor s = random_scores(7, 15).to(at::kFloat);
  for (const double size : {1.0, 1e3}) {  // within the kernel's range, and beyond
    for (std::int64_t u = 1; u < 6; ++u) {
      at::Tensor changed = s.clone();
      changed.narrow(1, u + 1, 6 - u).mul_(-size);
      changed.narrow(2, u, 7 - u).mul_(-size);
      for (const Path path : kPaths) {
        EXPECT_TRUE(at::equal(prefix_balance(s, 5, 0, path).narrow(1, 0, u + 1),
                              prefix_balance(changed, 5, 0, path).narrow(1, 0, u + 1)));
      }
    }
  }
}

TEST(CumulativeBalance, EqualsItsDefinitionAndSoDoesItsGradient) {
  const at::Tensor s = strictly_past(random_scores(24, 16, 2)).detach().set_requires_grad(true);
  const at::Tensor e = s.exp();
  at::Tensor a = at::ones({2, 24, 1}, at::kDouble), b;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor sums = (e * a).cumsum(1);
    const at::Tensor empty = sums == 0;
    b = (1 / sums.masked_fill(empty, 1)).masked_fill(empty, 0);
    a = 1 / (1 + (e * b).sum(-1, true));
  }
  const at::Tensor definition = a * e * b;
  for (const Path path : kPaths) {
    const at::Tensor p = cumulative_balance(s, 3, path);
    EXPECT_LE(max_difference(p, definition), 1e-14);
    EXPECT_LE(max_difference(gradients(p, {s})[0], gradients(definition, {s})[0]), 1e-13);
  }
}

TEST(CumulativeBalance, LaterScoresDoNotChangeABit) {
  const at::Tensor s = strictly_past(random_scores(6, 16));
  for (const double size : {3.0, 1e3}) {  // within the kernel's range, and beyond
    at::Tensor changed = s.clone();
    changed.narrow(1, 4, 2).mul_(-size);
    for (const Path path : kPaths) {
      EXPECT_TRUE(at::equal(cumulative_balance(s, 3, path).narrow(1, 0, 4),
                            cumulative_balance(changed, 3, path).narrow(1, 0, 4)));
    }
  }
}

// Scores of any range, with a masked destination and a masked source; and a single block.
TEST(CumulativeBalance, KernelEqualsReferenceAtEveryScale) {
  for (const double scale : {0.1, 1.0, 8.0, 30.0, 200.0, 1e4}) {
    at::Tensor scores = strictly_past(random_scores(21, 13, scale));
    scores.select(1, 7).fill_(kBarred);
    scores.select(2, 3).fill_(kBarred);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor leaf = scores.to(dtype).detach().set_requires_grad(true);
      const double tolerance =
          (dtype == at::kFloat ? 3e-7 : 1e-15) * std::max(8.0, 4 * scale);  // of S + f + g
      const at::Tensor fused = cumulative_balance(leaf, 5, Path::kFused),
                       reference = cumulative_balance(leaf, 5, Path::kReference);
      EXPECT_LE(max_difference(fused, reference), tolerance) << scale << " " << dtype;
      const at::Tensor d_fused = gradients(fused, {leaf})[0];
      EXPECT_TRUE(d_fused.isfinite().all().item<bool>());
      EXPECT_LE(max_difference(d_fused, gradients(reference, {leaf})[0]), 10 * tolerance)
          << scale << " " << dtype;
    }
  }
  const at::Tensor one = at::full({2, 1, 1}, kBarred, at::kDouble);
  EXPECT_EQ(cumulative_balance(one, 5, Path::kFused).abs().max().item<double>(), 0);
}

// Column potentials absorb shifts, even those whose exponential overflows.
TEST(CumulativeBalance, ColumnShiftsChangeNothing) {
  for (const Path path : kPaths) {
    const auto solve = [&](double shift) {
      const at::Tensor shifts = at::tensor({shift, -shift, shift, shift, -shift, 0.0}, at::kDouble);
      const at::Tensor leaf =
          (strictly_past(random_scores(6, 19, 3)) + shifts).set_requires_grad(true);
      const at::Tensor p = cumulative_balance(leaf, 3, path);
      return std::pair(p.detach(), gradients(p, {leaf})[0]);
    };
    const auto [p, d] = solve(0);
    const auto [p_shifted, d_shifted] = solve(2000);
    EXPECT_LE(max_difference(p, p_shifted), 1e-11);
    EXPECT_LE(max_difference(d, d_shifted), 1e-11);
  }
}

// More prefixes than one register block holds, and a number that does not fill the last one.
TEST(PrefixBalance, ManyPrefixesEqualTheReference) {
  for (const std::int64_t size : {1, 8, 9, 23}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      at::Tensor scores = random_scores(size, 31).to(dtype);
      if (size > 8) {
        scores[1].select(0, 3).fill_(kBarred);
        scores[1].select(1, 5).fill_(kBarred);
      }
      const at::Tensor leaf = scores.detach().set_requires_grad(true);
      const at::Tensor fused = prefix_balance(leaf, 4, size / 3, Path::kFused),
                       reference = prefix_balance(leaf, 4, size / 3, Path::kReference);
      const double tolerance = dtype == at::kFloat ? 3e-6 : 1e-14;
      EXPECT_LE(max_difference(fused, reference), tolerance) << size;
      EXPECT_LE(max_difference(gradients(fused, {leaf})[0], gradients(reference, {leaf})[0]),
                10 * tolerance)
          << size;
    }
  }
}

TEST(SoftmaxWithNull, SharesMassWithNull) {
  const at::Tensor s = strictly_past(random_scores(4, 17));
  const at::Tensor e = s.exp();
  EXPECT_LE(max_difference(softmax_with_null(s), e / (1 + e.sum(-1, true))), 1e-15);
}

// The published balance converges to the identity: the only triangular doubly stochastic matrix.
TEST(Balance, TriangleWithDiagonalCollapsesToTheIdentity) {
  const at::Tensor s =
      random_scores(6, 18).masked_fill(at::ones({6, 6}, at::kBool).triu(1), kBarred);
  for (const Path path : kPaths) {
    double before = 0;
    for (const int iterations : {2, 5, 10, 20, 100}) {
      const double diagonal = balance(s, iterations, path).diagonal(0, 1, 2).mean().item<double>();
      EXPECT_GT(diagonal, before);
      before = diagonal;
    }
    EXPECT_GT(before, 0.9);
  }
}

}  // namespace
}  // namespace birkhoff::test
