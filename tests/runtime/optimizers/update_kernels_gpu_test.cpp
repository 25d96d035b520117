// Compares the kernels that update a flat bucket with their CPU references.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "configs/schema/config.pb.h"
#include "runtime/gradients/gpu_chunk_sums_params.h"
#include "runtime/optimizers/optimizer.h"
#include "tests/kernel_error.h"
#include "tests/runtime/optimizers/gradient_norm.h"
#include "tests/runtime/optimizers/update_reference.h"

namespace birkhoff {
namespace {

using test::gradient_norm;

constexpr AdamWRule kAdamW{0.9, 0.95, 1e-8, 0.1};
constexpr SgdRule kSgd{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true};

// A bucket in the middle of training, fp64 on the CPU.
template <typename Rule>
FusedBucket make_bucket(std::int64_t elements) {
  FusedBucket bucket{.values_n = test_values({elements}, 1),
                     .gradients_n = test_values({elements}, 2) * 1e3,
                     .states_n = {},
                     .decayed_G = at::arange(elements / 64).remainder(3).ne(0).to(at::kByte)};
  for (int s = 0; s < Rule::kNumStates; ++s) {
    bucket.states_n.push_back(test_values({elements}, 3 + s).abs() * 0.01);
  }
  return bucket;
}

FusedBucket converted(const FusedBucket& bucket, at::ScalarType dtype,
                      at::ScalarType gradient_dtype, at::Device device) {
  const auto convert = [&](const at::Tensor& tensor, at::ScalarType to) {
    return tensor.to(device, to, /*non_blocking=*/false, /*copy=*/true);
  };
  FusedBucket result{.values_n = convert(bucket.values_n, dtype),
                     .gradients_n = convert(bucket.gradients_n, gradient_dtype),
                     .states_n = {},
                     .decayed_G = convert(bucket.decayed_G, at::kByte)};
  for (const at::Tensor& state : bucket.states_n) result.states_n.push_back(convert(state, dtype));
  return result;
}

at::Tensor scalars_of(double apply) {
  const at::Tensor scalars = at::zeros({StepScalars::kNumScalars}, at::kDouble);
  scalars[StepScalars::kLearningRate] = 3e-3;
  scalars[StepScalars::kGradientScale] = 1e-3;
  scalars[StepScalars::kApply] = apply;
  return scalars;
}

template <typename Rule>
void check_update(const Rule& rule, std::int64_t elements, at::ScalarType gradient_dtype) {
  SCOPED_TRACE(fmt::format("{}, {} elements, gradients {}", Rule::kName, elements,
                           c10::toString(gradient_dtype)));
  const FusedBucket start =
      converted(make_bucket<Rule>(elements), at::kFloat, gradient_dtype, at::kCPU);
  FusedBucket exact = converted(start, at::kDouble, at::kDouble, at::kCPU);
  FusedBucket reference = converted(start, at::kFloat, gradient_dtype, at::kCPU);
  FusedBucket kernel = converted(start, at::kFloat, gradient_dtype, at::kCUDA);
  const at::Tensor scalars = scalars_of(1), num_updates = at::full({1}, 7.0, at::kDouble);
  test::reference_update(exact, rule, scalars, num_updates);
  test::reference_update(reference, rule, scalars, num_updates);
  fused_update(kernel, rule, scalars.cuda(), num_updates.cuda());
  expect_as_exact(kernel.values_n, reference.values_n, exact.values_n, "values");
  for (std::size_t s = 0; s < Rule::kNumStates; ++s) {
    expect_as_exact(kernel.states_n[s], reference.states_n[s], exact.states_n[s],
                    Rule::kStateNames[s]);
  }

  FusedBucket again = converted(start, at::kFloat, gradient_dtype, at::kCUDA);
  fused_update(again, rule, scalars.cuda(), num_updates.cuda());
  expect_same_bits(again.values_n, kernel.values_n, "a second time");
}

TEST(FusedUpdateKernel, SmallIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t elements : {0, 64, 1024, 1088, 4032}) {
      check_update(kAdamW, elements, dtype);
      check_update(kSgd, elements, dtype);
    }
  }
}

// More than one round of the grid.
TEST(FusedUpdateKernel, LargeIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    check_update(kAdamW, 3000064, dtype);
    check_update(kSgd, 3000064, dtype);
  }
}

template <typename Rule>
void check_skipped_step(const Rule& rule) {
  FusedBucket before = converted(make_bucket<Rule>(640), at::kFloat, at::kFloat, at::kCUDA);
  before.gradients_n.fill_(std::numeric_limits<float>::quiet_NaN());
  FusedBucket after = converted(before, at::kFloat, at::kFloat, at::kCUDA);
  fused_update(after, rule, scalars_of(0).cuda(), at::full({1}, 7.0, at::kDouble).cuda());
  expect_same_bits(after.values_n, before.values_n, "values");
  for (std::size_t s = 0; s < Rule::kNumStates; ++s) {
    expect_same_bits(after.states_n[s], before.states_n[s], Rule::kStateNames[s]);
  }
}

TEST(FusedUpdateKernel, SmallAStepThatIsNotAppliedChangesNothing) {
  check_skipped_step(kAdamW);
  check_skipped_step(kSgd);
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
void check_optimizer(const configs::Optimizer& config) {
  struct Side {
    Side(const configs::Optimizer& config, at::Device device)
        : group(make_single_group(device)),
          parameters(make_parameters(device)),
          buckets(parameters, *group, /*bucket_elements=*/100),
          optimizer(make_optimizer(config, buckets)),
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
    std::unique_ptr<Optimizer> optimizer;
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
      side->optimizer->step(side->scalars);
    }
    const auto expected = host.optimizer->state(), actual = device.optimizer->state();
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
  configs::Optimizer config;
  configs::AdamW& adamw = *config.mutable_adamw();
  adamw.set_beta1(0.875f);
  adamw.set_beta2(0.96875f);
  adamw.set_epsilon(0.0009765625f);
  adamw.set_weight_decay(0.125f);
  check_optimizer(config);
  for (const bool nesterov : {false, true}) {
    config.mutable_sgd()->set_momentum(0.875f);
    config.mutable_sgd()->set_weight_decay(0.125f);
    config.mutable_sgd()->set_nesterov(nesterov);
    check_optimizer(config);
  }
  configs::Adafactor& adafactor = *config.mutable_adafactor();
  adafactor.set_decay_exponent(0.8f);
  adafactor.set_clip_update(1);
  adafactor.set_epsilon1(1e-30f);
  adafactor.set_epsilon2(1e-3f);
  adafactor.set_scale_by_parameter(true);
  check_optimizer(config);
}

}  // namespace
}  // namespace birkhoff
