#include "cluster/base/tensors/parameters.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff {
namespace {

TEST(Parameters, ValuesDependOnSeedAndNameAlone) {
  Parameters a(1, at::kFloat), b(1, at::kFloat), other_seed(2, at::kFloat);
  const at::Tensor first = a.add("x", {7, 5}, Initializer::normal(1), true);
  b.add("before", {3}, Initializer::normal(1), true);
  EXPECT_TRUE(at::equal(first, b.add("x", {7, 5}, Initializer::normal(1), true)));
  EXPECT_FALSE(at::equal(first, other_seed.add("x", {7, 5}, Initializer::normal(1), true)));
  EXPECT_FALSE(at::equal(first, a.add("y", {7, 5}, Initializer::normal(1), true)));
}

TEST(Parameters, Fp64StartsWhereFp32Does) {
  Parameters a(1, at::kFloat), b(1, at::kDouble);
  EXPECT_TRUE(at::equal(a.add("x", {9}, Initializer::normal(0.02), true).to(at::kDouble),
                        b.add("x", {9}, Initializer::normal(0.02), true)));
}

TEST(Parameters, DistributionsHaveTheirMoments) {
  Parameters parameters(1, at::kDouble);
  const at::Tensor normal = parameters.add("n", {1000, 101}, Initializer::normal(0.5), true);
  EXPECT_NEAR(normal.mean().item<double>(), 0, 0.008);
  EXPECT_NEAR(normal.std().item<double>(), 0.5, 0.006);
  EXPECT_NEAR(normal.pow(4).mean().item<double>(), 3 * 0.0625, 0.01);
  const at::Tensor uniform = parameters.add("u", {1000, 101}, Initializer::uniform(2), true);
  EXPECT_NEAR(uniform.mean().item<double>(), 0, 0.02);
  EXPECT_NEAR(uniform.var().item<double>(), 4.0 / 3, 0.02);
  EXPECT_LE(uniform.abs().max().item<double>(), 2);
  EXPECT_EQ(parameters.add("o", {2}, Initializer::ones(), false).sum().item<double>(), 2);
  EXPECT_EQ(parameters.add("z", {2}, Initializer::zeros(), false).sum().item<double>(), 0);
  EXPECT_EQ(parameters.num_elements(), 2 * 101000 + 4);
  EXPECT_TRUE(parameters.list()[0].value.requires_grad());
  EXPECT_FALSE(parameters.list()[2].decay);
}

TEST(Parameters, ThousandthElementIsWhatItWas) {
  Parameters parameters(1, at::kFloat);
  const at::Tensor x = parameters.add("model.weight", {2000}, Initializer::normal(1), true);
  Parameters longer(1, at::kFloat);
  const at::Tensor y = longer.add("model.weight", {20000}, Initializer::normal(1), true);
  EXPECT_TRUE(at::equal(x, y.narrow(0, 0, 2000)));  // element e depends only on e
}

TEST(Parameters, NamesAreUnique) {
  Parameters parameters(1, at::kFloat);
  parameters.add("x", {1}, Initializer::zeros(), false);
  EXPECT_THROW(parameters.add("x", {1}, Initializer::zeros(), false), Error);
}

}  // namespace
}  // namespace birkhoff
