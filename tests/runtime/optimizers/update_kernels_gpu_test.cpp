// Compares the kernels that update a flat bucket with their CPU references.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "configs/schema/config.pb.h"
#include "runtime/gradients/gpu_chunk_sums_params.h"
#include "runtime/optimizers/adafactor.h"
#include "runtime/optimizers/adamw.h"
#include "runtime/optimizers/gpu_adamw.h"
#include "tests/kernel_error.h"
#include "tests/runtime/optimizers/adamw_reference.h"
#include "tests/runtime/optimizers/gradient_norm.h"

namespace birkhoff {
namespace {

using test::gradient_norm;

constexpr AdamWConstants kConstants{0.9, 0.95, 1e-8, 0.1};

// A bucket in the middle of training, fp64 on the CPU.
FusedAdamWBucket make_bucket(std::int64_t elements) {
  return {.values_n = test_values({elements}, 1),
          .gradients_n = test_values({elements}, 2) * 1e3,
          .m_n = test_values({elements}, 3) * 0.1,
          .v_n = test_values({elements}, 4).abs() * 0.01,
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
  test::reference_adamw(exact, kConstants, scalars, num_updates);
  test::reference_adamw(reference, kConstants, scalars, num_updates);
  fused_adamw(kernel, kConstants, scalars.cuda(), num_updates.cuda());
  expect_as_exact(kernel.values_n, reference.values_n, exact.values_n, "values");
  expect_as_exact(kernel.m_n, reference.m_n, exact.m_n, "m");
  expect_as_exact(kernel.v_n, reference.v_n, exact.v_n, "v");

  FusedAdamWBucket again = converted(start, at::kFloat, gradient_dtype, at::kCUDA);
  fused_adamw(again, kConstants, scalars.cuda(), num_updates.cuda());
  expect_same_bits(again.values_n, kernel.values_n, "a second time");
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
}

void check_chunk_sums(std::int64_t elements, at::ScalarType dtype) {
  const at::Tensor x = (test_values({elements}, 5) * 1e3).to(dtype);
  expect_same_bits(chunk_sums_of_squares({x.cuda()}), chunk_sums_of_squares({x}),
                   fmt::format("{} of {}", elements, c10::toString(dtype)));
}

TEST(ChunkSumsKernel, SmallHasTheBitsOfTheHost) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t elements : {0, 1, 15, 16, 17, 4095, 4096, 4097, 12293}) {
      check_chunk_sums(elements, dtype);
    }
  }
}

TEST(ChunkSumsKernel, LargeHasTheBitsOfTheHost) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) check_chunk_sums(10000019, dtype);
}

TEST(ChunkSumsKernel, SmallTensorsFollowOneAnother) {
  std::vector<at::Tensor> host, device;
  for (int i = 0; i < 2 * ChunkSumsParams::kMaxTensors + 3; ++i) {
    host.push_back(test_values({i % 5 == 4 ? 0 : i * 977 % 9001 + 1}, i).to(at::kFloat));
    device.push_back(host.back().cuda());
  }
  std::vector<at::Tensor> one_by_one;
  for (const at::Tensor& each : host) one_by_one.push_back(chunk_sums_of_squares({each}));
  expect_same_bits(chunk_sums_of_squares(device), at::cat(one_by_one), "on the GPU");
  expect_same_bits(chunk_sums_of_squares(host), at::cat(one_by_one), "on the host");
}

TEST(ChunkSumsKernel, SmallIsNotFiniteWhereAnElementIsNot) {
  const at::Tensor x = at::ones({5000}, at::kCUDA);
  x[4999] = std::numeric_limits<float>::infinity();
  const at::Tensor sums = chunk_sums_of_squares({x}).cpu();
  EXPECT_EQ(sums[0].item<double>(), 4096);
  EXPECT_FALSE(std::isfinite(sums[1].item<double>()));
}

// The optimizers as training uses them: parameters, buckets and state on both devices, side by
// side.
template <typename Optimizer, typename Config>
void check_optimizer(const Config& config) {
  struct Side {
    Side(const Config& config, at::Device device)
        : group(make_single_group(device)),
          parameters(make_parameters(device)),
          buckets(parameters, *group, /*bucket_elements=*/100),
          optimizer(config, buckets),
          scalars(device) {}
    static Parameters make_parameters(at::Device device) {
      Parameters all(5, at::kFloat, at::kFloat, device);
      all.add("matrix", {11, 13}, Initializer::normal(0.3), true);
      all.add("bias", {13}, Initializer::normal(0.2), false);
      all.add("stack", {2, 70, 3}, Initializer::normal(0.1), true);
      return all;
    }
    std::unique_ptr<ProcessGroup> group;
    Parameters parameters;
    GradBuckets buckets;
    Optimizer optimizer;
    StepScalars scalars;
  };
  Side host(config, at::kCPU), device(config, at::kCUDA);
  for (int step = 1; step <= 5; ++step) {
    const bool apply = step != 3;
    for (std::size_t b = 0; b < host.buckets.buckets().size(); ++b) {
      const at::Tensor& gradients = host.buckets.buckets()[b].gradients;
      for (const auto& slot : host.buckets.buckets()[b].slots) {  // padding keeps its zeros
        gradients.narrow(0, slot.offset, slot.elements)
            .copy_(test_values({slot.elements}, static_cast<double>(step)));
      }
      if (!apply) gradients[0] = std::numeric_limits<float>::quiet_NaN();
      device.buckets.buckets()[b].gradients.copy_(gradients);
    }
    for (Side* side : {&host, &device}) {
      side->scalars.set(StepScalars::kLearningRate, 0.01 * step);
      side->scalars.set(StepScalars::kGradientScale, 0.5);
      side->scalars.set(StepScalars::kApply, apply ? 1 : 0);
      side->scalars.publish();
      side->optimizer.step(side->scalars);
    }
    const auto expected = host.optimizer.state(), actual = device.optimizer.state();
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(actual[i].data.cpu(), expected[i].data, 1e-5, 1e-7))
          << "step " << step << " " << expected[i].name;
    }
    for (std::size_t b = 0; b < host.buckets.buckets().size(); ++b) {
      EXPECT_TRUE(at::allclose(device.buckets.buckets()[b].values.cpu(),
                               host.buckets.buckets()[b].values, 1e-5, 1e-6))
          << "step " << step << " bucket " << b;
    }
    EXPECT_EQ(apply, gradient_norm(device.buckets) == gradient_norm(host.buckets)) << step;
  }
}

TEST(OptimizersOnGpu, SmallComeToTheHostsValues) {
  configs::AdamW adamw;
  adamw.set_beta1(0.875f);
  adamw.set_beta2(0.96875f);
  adamw.set_epsilon(0.0009765625f);
  adamw.set_weight_decay(0.125f);
  check_optimizer<AdamW>(adamw);
  configs::Adafactor adafactor;
  adafactor.set_decay_exponent(0.8f);
  adafactor.set_clip_update(1);
  adafactor.set_epsilon1(1e-30f);
  adafactor.set_epsilon2(1e-3f);
  adafactor.set_scale_by_parameter(true);
  check_optimizer<Adafactor>(adafactor);
}

}  // namespace
}  // namespace birkhoff
