// The kernels that update a flat bucket, against their references on the CPU.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/fused_adamw.h"
#include "runtime/squared_norm.h"
#include "tests/kernel_error.h"

namespace birkhoff {
namespace {

constexpr AdamWConstants kConstants{0.9, 0.95, 1e-8, 0.1};

// A bucket in the middle of training, fp64 on the CPU.
FusedAdamWBucket make_bucket(std::int64_t elements) {
  return {.values_n = test_values({elements}, 1),
          .gradients_n = test_values({elements}, 2) * 1e3,
          .m_n = test_values({elements}, 3) * 0.1,
          .v_n = test_values({elements}, 4).abs() * 0.01,
          .compute_n = at::zeros({elements}, at::kBFloat16),
          .decayed_G = at::arange(elements / 64).remainder(3).ne(0).to(at::kByte)};
}

FusedAdamWBucket converted(const FusedAdamWBucket& bucket, at::ScalarType dtype,
                           at::ScalarType gradient_dtype, at::Device device) {
  const auto convert = [&](const at::Tensor& tensor, at::ScalarType to) {
    return tensor.to(device, to, /*non_blocking=*/false, /*copy=*/true);
  };
  return {.values_n = convert(bucket.values_n, dtype),
          .gradients_n = convert(bucket.gradients_n, gradient_dtype),
          .m_n = convert(bucket.m_n, dtype),
          .v_n = convert(bucket.v_n, dtype),
          .compute_n = convert(bucket.compute_n, at::kBFloat16),
          .decayed_G = convert(bucket.decayed_G, at::kByte)};
}

at::Tensor scalars_of(double apply) {
  const at::Tensor scalars = at::zeros({StepScalars::kNumScalars}, at::kDouble);
  scalars[StepScalars::kLearningRate] = 3e-3;
  scalars[StepScalars::kGradientScale] = 1e-3;
  scalars[StepScalars::kApply] = apply;
  return scalars;
}

void check_update(std::int64_t elements, at::ScalarType gradient_dtype) {
  SCOPED_TRACE(fmt::format("{} elements, gradients {}", elements, c10::toString(gradient_dtype)));
  const FusedAdamWBucket start =
      converted(make_bucket(elements), at::kFloat, gradient_dtype, at::kCPU);
  FusedAdamWBucket exact = converted(start, at::kDouble, at::kDouble, at::kCPU);
  FusedAdamWBucket reference = converted(start, at::kFloat, gradient_dtype, at::kCPU);
  FusedAdamWBucket kernel = converted(start, at::kFloat, gradient_dtype, at::kCUDA);
  const at::Tensor scalars = scalars_of(1), num_updates = at::full({1}, 7.0, at::kDouble);
  reference_adamw(exact, kConstants, scalars, num_updates);
  reference_adamw(reference, kConstants, scalars, num_updates);
  fused_adamw(kernel, kConstants, scalars.cuda(), num_updates.cuda());
  expect_as_exact(kernel.values_n, reference.values_n, exact.values_n, "values");
  expect_as_exact(kernel.m_n, reference.m_n, exact.m_n, "m");
  expect_as_exact(kernel.v_n, reference.v_n, exact.v_n, "v");
  expect_same_bits(kernel.compute_n, kernel.values_n.to(at::kBFloat16), "compute copy");

  FusedAdamWBucket again = converted(start, at::kFloat, gradient_dtype, at::kCUDA);
  again.compute_n = at::Tensor();
  fused_adamw(again, kConstants, scalars.cuda(), num_updates.cuda());
  expect_same_bits(again.values_n, kernel.values_n, "a second time, without a compute copy");
}

TEST(FusedAdamWKernel, SmallIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t elements : {0, 64, 1024, 1088, 4032}) check_update(elements, dtype);
  }
}

// More than one round of the grid.
TEST(FusedAdamWKernel, LargeIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) check_update(3000064, dtype);
}

TEST(FusedAdamWKernel, SmallAStepThatIsNotAppliedChangesNothing) {
  FusedAdamWBucket before = converted(make_bucket(640), at::kFloat, at::kFloat, at::kCUDA);
  before.gradients_n.fill_(std::numeric_limits<float>::quiet_NaN());
  FusedAdamWBucket after = converted(before, at::kFloat, at::kFloat, at::kCUDA);
  fused_adamw(after, kConstants, scalars_of(0).cuda(), at::full({1}, 7.0, at::kDouble).cuda());
  expect_same_bits(after.values_n, before.values_n, "values");
  expect_same_bits(after.m_n, before.m_n, "m");
  expect_same_bits(after.v_n, before.v_n, "v");
  expect_same_bits(after.compute_n, before.compute_n, "compute copy");
}

void check_norm(std::int64_t elements, at::ScalarType dtype) {
  const at::Tensor x = (test_values({elements}, 5) * 1e3).to(dtype);
  const at::Tensor on_host = at::full({1}, 0.25, at::kDouble), on_device = on_host.cuda();
  add_squared_norm(x, on_host);
  add_squared_norm(x.cuda(), on_device);
  expect_same_bits(on_device, on_host, fmt::format("{} of {}", elements, c10::toString(dtype)));
}

TEST(SquaredNormKernel, SmallHasTheBitsOfTheHost) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t elements : {0, 1, 15, 16, 17, 4095, 4096, 4097, 12293}) {
      check_norm(elements, dtype);
    }
  }
}

TEST(SquaredNormKernel, LargeHasTheBitsOfTheHost) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) check_norm(10000019, dtype);
}

TEST(SquaredNormKernel, SmallIsNotFiniteWhereAnElementIsNot) {
  const at::Tensor x = at::ones({5000}, at::kCUDA), total = at::zeros({1}, at::kDouble).cuda();
  x[4999] = std::numeric_limits<float>::infinity();
  add_squared_norm(x, total);
  EXPECT_FALSE(std::isfinite(total.item<double>()));
}

}  // namespace
}  // namespace birkhoff
