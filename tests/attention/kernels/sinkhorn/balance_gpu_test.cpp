// The GPU kernels of the Sinkhorn operator, against the specification on the CPU.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <limits>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/sinkhorn/gpu_params.h"
#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff {
namespace {

struct Result {
  at::Tensor p, d_scores;
};

using Kind = BalanceKind;

Result solve(const at::Tensor& scores, Kind kind, std::int64_t first_row, Path path) {
  const at::Tensor leaf = scores.detach().clone().requires_grad_(true);
  const at::Tensor p = kind == Kind::kPrefix  ? prefix_balance(leaf, 5, first_row, path)
                       : kind == Kind::kWhole ? balance(leaf, 5, path)
                                              : cumulative_balance(leaf, 5, path);
  const at::Tensor d_p = test::random_tensor(p.sizes(), at::kFloat, 5).to(p.options());
  p.backward(d_p);
  return {p.detach(), leaf.grad()};
}

void check(const std::string& what, const at::Tensor& scores, Kind kind,
           std::int64_t first_row = 0) {
  const Result reference = solve(scores, kind, first_row, Path::kReference);
  const Result exact = solve(scores.to(at::kDouble), kind, first_row, Path::kReference);
  const Result kernel = solve(scores.cuda(), kind, first_row, Path::kFused);
  const Result again = solve(scores.cuda(), kind, first_row, Path::kFused);
  expect_as_exact(kernel.p, reference.p, exact.p, what + ", P");
  expect_as_exact(kernel.d_scores, reference.d_scores, exact.d_scores, what + ", gradient");
  expect_same_bits(kernel.p, again.p, what + ", a second time");
  expect_same_bits(kernel.d_scores, again.d_scores, what + ", gradient a second time");
}

at::Tensor random_scores(std::int64_t matrices, std::int64_t size, double scale = 1) {
  return test::random_tensor({matrices, 2, size, size}, at::kFloat, 3) * scale;
}

TEST(BalanceKernel, SmallIsAsExactAsTheSpecification) {
  for (const std::int64_t size : {1, 2, 5, 33, 63, 64, 65}) {
    for (const Kind kind : {Kind::kWhole, Kind::kPrefix}) {
      check(fmt::format("N {} kind {}", size, static_cast<int>(kind)), random_scores(2, size),
            kind);
    }
  }
  check("last prefixes", random_scores(1, 36), Kind::kPrefix, 33);
  check("out of any range", random_scores(1, 9, 1e4), Kind::kPrefix);
  for (const double scale : {10.0, 20.0, 45.0}) {
    check(fmt::format("partly out of range, scale {}", scale), random_scores(1, 70, scale),
          Kind::kPrefix);
  }
}

TEST(BalanceKernel, SmallCumulative) {
  for (const std::int64_t size : {1, 33, 64, 65, 256}) {
    for (const double scale : {1.0, 20.0, 1e3}) {
      const at::Tensor later = at::ones({size, size}, at::kBool).triu();
      const at::Tensor scores =
          random_scores(2, size, scale).masked_fill(later, -std::numeric_limits<float>::infinity());
      check(fmt::format("cumulative, N {} scale {}", size, scale), scores, Kind::kCumulative);
    }
  }
}

TEST(BalanceKernel, SmallFutureScoresChangeNoBit) {
  for (const std::int64_t size : {40, 70, 140}) {
    const at::Tensor scores = random_scores(1, size);
    const at::Tensor before = prefix_balance(scores.cuda(), 5, 0, Path::kFused);
    for (const float later : {0.5f, 49.0f, -1e3f, -std::numeric_limits<float>::infinity()}) {
      for (const std::int64_t u : {std::int64_t{17}, size - 5}) {
        at::Tensor changed = scores.clone();
        changed.narrow(2, u + 1, size - u - 1).fill_(later);
        changed.narrow(3, u, size - u).fill_(later);
        const at::Tensor after = prefix_balance(changed.cuda(), 5, 0, Path::kFused);
        expect_same_bits(after.narrow(2, 0, u + 1), before.narrow(2, 0, u + 1),
                         fmt::format("N {} u {} later {}", size, u, later));
      }
    }
  }
}

TEST(BalanceKernel, SmallEmptyRowsAndColumns) {
  at::Tensor scores = random_scores(1, 7);
  scores.select(2, 2).fill_(-std::numeric_limits<float>::infinity());
  scores.select(3, 4).fill_(-std::numeric_limits<float>::infinity());
  for (const Kind kind : {Kind::kWhole, Kind::kPrefix}) check("empty row and column", scores, kind);
}

TEST(BalanceKernel, SmallOutOfRange) {
  for (const double scale : {10.0, 20.0, 45.0}) {
    for (const std::int64_t size : {40, 70}) {
      check(fmt::format("N {} scale {}", size, scale), random_scores(1, size, scale), Kind::kWhole);
    }
  }
}

// The kernel rounds as LibTorch does, also where it solves in the log domain, and mixing with what
// it has rounded gives the same bits and gradients.
TEST(BalanceKernel, SmallRoundsForMixing) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const std::int64_t size : {5, 16, 40, 130}) {
      for (const double scale : {1.0, 200.0}) {
        const std::string name = fmt::format("N {} scale {}", size, scale);
        const at::Tensor scores = random_scores(1, size, scale).cuda().requires_grad_(true);
        const auto [p, rounded] = balance_and_round(scores, 5, dtype, Path::kFused);
        ASSERT_EQ(rounded.size(3), (size + 7) / 8 * 8) << name;
        EXPECT_FALSE(rounded.requires_grad()) << name;
        expect_same_bits(rounded.narrow(3, 0, size), p.detach().to(dtype), name);
        EXPECT_EQ(rounded.narrow(3, size, rounded.size(3) - size).abs().sum().item<float>(), 0);
        const at::Tensor x =
            test::random_tensor({1, 2, size, 2, 8}, at::kFloat, 7).cuda().to(dtype);
        const auto mixed = [&](const at::Tensor& weights) {
          const at::Tensor y = mix_lower_blocks(p, {x}, size - 1, Path::kFused, weights).y_BHNbD[0];
          scores.mutable_grad() = at::Tensor();
          y.backward(x, /*retain_graph=*/true);
          return Result{y.detach(), scores.grad()};
        };
        const Result with = mixed(rounded), without = mixed({});
        expect_same_bits(with.p, without.p, name + ", mixes");
        expect_same_bits(with.d_scores, without.d_scores, name + ", gradient");
      }
    }
  }
}

// Both places of the scores: shared memory, and L2 for scores that do not fit there.
TEST(BalanceKernel, LargeIsAsExactAsTheSpecification) {
  for (const std::int64_t size : {128, 200, 256}) {
    check(fmt::format("N {}", size), random_scores(2, size), Kind::kWhole);
    check(fmt::format("N {} prefix", size), random_scores(1, size), Kind::kPrefix, size - 5);
  }
  check("prefixes of two panels", random_scores(1, 256), Kind::kPrefix, 200);
  check("prefixes from the first on", random_scores(1, 130), Kind::kPrefix);
}

// More scratch memory than is allocated at one time.
TEST(BalanceKernel, LargeInParts) { check("in parts", random_scores(7000, 16), Kind::kPrefix, 0); }

}  // namespace
}  // namespace birkhoff
