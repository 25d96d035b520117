// What the GPU kernels of the Sinkhorn operator compute, without a GPU: against the specification
// in fp64, as exact as the specification in fp32. Legend: N blocks, R rows, C columns.
#include "tests/attention/balance_emulated.h"

#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <limits>

#include "attention/balance.h"
#include "tests/attention/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::testing {
namespace {

constexpr int kSm90 = 232448;

struct Case {
  std::string name;
  at::Tensor scores;  // [matrices, R, C] fp32
  bool prefix;
  int first_row = 0, iterations = 5, shared_limit = kSm90;
};

struct Result {
  at::Tensor p, d_scores;
};

Result specified(const Case& c, at::ScalarType dtype, const at::Tensor& d_p) {
  const at::Tensor leaf = c.scores.to(dtype).detach().requires_grad_(true);
  const at::Tensor p =
      c.prefix ? prefix_balance(leaf, c.iterations, c.first_row, BalancePath::kReference)
               : balance(leaf, c.iterations, BalancePath::kReference);
  p.backward(d_p.to(dtype));
  return {p.detach(), leaf.grad()};
}

Result emulated(const Case& c, const at::Tensor& d_p) {
  Result result{at::full(d_p.sizes(), NAN, d_p.options()), at::full_like(c.scores, NAN)};
  const int rows = static_cast<int>(c.scores.size(1));
  const BalanceParams params{.matrices = c.scores.size(0),
                             .rows = rows,
                             .columns = static_cast<int>(c.scores.size(2)),
                             .iterations = c.iterations,
                             .prefix = c.prefix,
                             .first_row = c.first_row,
                             .results = c.prefix ? rows - c.first_row : 1,
                             .scores = c.scores.const_data_ptr<float>(),
                             .p = result.p.mutable_data_ptr<float>()};
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

void check(const Case& c) {
  const at::Tensor d_p = random_tensor(
      {c.scores.size(0), c.scores.size(1) - c.first_row, c.scores.size(2)}, at::kFloat, 5);
  const Result kernel = emulated(c, d_p), reference = specified(c, at::kFloat, d_p),
               exact = specified(c, at::kDouble, d_p);
  expect_as_exact(kernel.p, reference.p, exact.p, c.name + ", P");
  expect_as_exact(kernel.d_scores, reference.d_scores, exact.d_scores, c.name + ", gradient");
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

TEST_F(EmulatedBalanceKernel, IsAsExactAsTheSpecification) {
  for (const std::int64_t N : {1, 2, 5, 33}) {
    for (const bool prefix : {false, true}) {
      if (prefix && N > 5) continue;
      check({fmt::format("N {} prefix {}", N, prefix), scores({2, N, N}), prefix});
      check({fmt::format("one iteration, N {} prefix {}", N, prefix), scores({1, N, N}), prefix, 0,
             1});
    }
  }
  check({"not square", scores({1, 3, 40}), false});
  check({"not square", scores({1, 40, 3}), false});
  check({"last prefixes", scores({1, 36, 36}), true, 33, 2});
}

TEST_F(EmulatedBalanceKernel, EachNumberOfColumnsAndPlaceOfTheScores) {
  check({"128 columns", scores({1, 9, 100}), false, 0, 2});
  check({"256 columns", scores({1, 9, 250}), false, 0, 2});
  check({"256 columns, scores in memory", scores({1, 17, 250}), false, 0, 2, 20000});
  check({"256 columns, scores in memory, a prefix", scores({1, 140, 140}), true, 139, 2, 20000});
}

// Of any size: the kernel has no range to leave.
TEST_F(EmulatedBalanceKernel, LargeScores) {
  for (const double scale : {30.0, 200.0, 1e4}) {
    for (const bool prefix : {false, true}) {
      check({fmt::format("scale {} prefix {}", scale, prefix), scores({2, 6, 6}, scale), prefix});
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
  for (const bool prefix : {false, true}) {
    check({"empty row and column", empty, prefix});
    check({"triangle", triangle, prefix});
    check({"nothing", at::full({1, 3, 3}, kBarred), prefix});
  }
}

}  // namespace
}  // namespace birkhoff::testing
