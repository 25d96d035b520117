// The update of a flat bucket: the optimizer that CPU training uses, and the source of the GPU
// kernel run on the CPU, against the reference by which the kernel is measured on a GPU
// (update_kernels_gpu_test.cpp).
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/optimizers/fused_optimizer.h"
#include "tests/kernel_error.h"
#include "tests/runtime/optimizers/update_kernel_emulated.h"
#include "tests/runtime/optimizers/update_reference.h"

namespace birkhoff {
namespace {

constexpr AdamWRule kAdamW{0.875, 0.96875, 0.0009765625, 0.125};
constexpr SgdRule kSgd{.momentum = 0.875, .weight_decay = 0.125, .nesterov = false};
constexpr SgdRule kNesterov{.momentum = 0.875, .weight_decay = 0.125, .nesterov = true};

at::Tensor decay_flags(const GradBucket& bucket) {
  const at::Tensor flags = at::zeros({bucket.elements() / 64}, at::kByte);
  for (const GradBucket::Slot& slot : bucket.slots) {
    const std::int64_t groups = (slot.elements + 63) / 64;
    flags.narrow(0, slot.offset / 64, groups).fill_(slot.decay ? 1 : 0);
  }
  return flags;
}

at::Tensor scalars_of(double rate, double scale, double apply) {
  const at::Tensor scalars = at::zeros({StepScalars::kNumScalars}, at::kDouble);
  scalars[StepScalars::kLearningRate] = rate;
  scalars[StepScalars::kGradientScale] = scale;
  scalars[StepScalars::kApply] = apply;
  return scalars;
}

template <typename Rule>
void check_optimizer(const Rule& rule) {
  Parameters parameters(5, at::kDouble);
  parameters.add("matrix", {11, 13}, Initializer::normal(0.3), true);
  parameters.add("bias", {13}, Initializer::normal(0.2), false);
  parameters.add("stack", {2, 70}, Initializer::normal(0.1), true);
  const std::unique_ptr<ProcessGroup> group = make_single_group();
  GradBuckets buckets(parameters, *group, /*bucket_elements=*/1 << 20);
  ASSERT_EQ(buckets.buckets().size(), 1u);
  GradBucket& bucket = buckets.buckets()[0];
  FusedOptimizer<Rule> optimizer(rule, buckets);

  FusedBucket fused{.values_n = bucket.values.clone(),
                    .gradients_n = {},
                    .states_n = std::vector<at::Tensor>(Rule::kNumStates),
                    .decayed_G = decay_flags(bucket)};
  for (at::Tensor& state : fused.states_n) state = at::zeros_like(bucket.values);
  const at::Tensor num_updates = at::zeros({1}, at::kDouble);
  for (int step = 1; step <= 4; ++step) {
    const bool apply = step != 3;  // a skipped step: not even its number counts
    for (const GradBucket::Slot& slot : bucket.slots) {
      bucket.gradients.narrow(0, slot.offset, slot.elements)
          .copy_(test_values({slot.elements}, step));
    }
    if (!apply) bucket.gradients[5] = std::numeric_limits<double>::quiet_NaN();
    fused.gradients_n = bucket.gradients.clone();
    StepScalars scalars;
    scalars.set(StepScalars::kLearningRate, 0.01 / step);
    scalars.set(StepScalars::kGradientScale, 0.5);
    scalars.set(StepScalars::kApply, apply ? 1 : 0);
    optimizer.step(scalars);
    num_updates.add_(apply ? 1 : 0);
    test::reference_update(fused, rule, scalars_of(0.01 / step, 0.5, apply ? 1 : 0), num_updates);
    for (const GradBucket::Slot& slot : bucket.slots) {
      const at::Tensor difference = fused.values_n.narrow(0, slot.offset, slot.elements) -
                                    bucket.values.narrow(0, slot.offset, slot.elements);
      EXPECT_LT(difference.abs().max().template item<double>(), 1e-14)
          << Rule::kName << " step " << step << slot.name;
    }
  }
}

TEST(FusedOptimizer, EqualsTheReferenceThatTheKernelIsComparedWith) {
  check_optimizer(kAdamW);
  check_optimizer(kSgd);
  check_optimizer(kNesterov);
}

// A bucket in the middle of training.
template <typename Rule>
FusedBucket make_bucket(std::int64_t elements, at::ScalarType dtype, at::ScalarType of_gradients) {
  FusedBucket bucket{
      .values_n = test_values({elements}, 1).to(at::kFloat).to(dtype),
      .gradients_n = (test_values({elements}, 2) * 1e3).to(at::kBFloat16).to(of_gradients),
      .states_n = {},
      .decayed_G = at::arange(elements / 64).remainder(3).ne(0).to(at::kByte)};
  for (int s = 0; s < Rule::kNumStates; ++s) {
    bucket.states_n.push_back(
        (test_values({elements}, 3 + s).abs() * 0.01).to(at::kFloat).to(dtype));
  }
  return bucket;
}

template <typename Rule>
void emulate(const FusedBucket& bucket, const Rule& rule, const at::Tensor& scalars_K,
             const at::Tensor& num_updates_1) {
  FusedUpdateParams<Rule> params{};
  params.rule = rule;
  params.elements = bucket.values_n.numel();
  params.values = bucket.values_n.mutable_data_ptr<float>();
  for (std::size_t s = 0; s < bucket.states_n.size(); ++s) {
    params.states[s] = bucket.states_n[s].mutable_data_ptr<float>();
  }
  params.gradients = bucket.gradients_n.const_data_ptr();
  params.gradient_dtype =
      bucket.gradients_n.scalar_type() == at::kFloat ? KernelDtype::kFloat : KernelDtype::kBFloat16;
  params.decayed = bucket.decayed_G.const_data_ptr<std::uint8_t>();
  const double* scalars = scalars_K.const_data_ptr<double>();
  params.learning_rate = scalars + StepScalars::kLearningRate;
  params.gradient_scale = scalars + StepScalars::kGradientScale;
  params.apply = scalars + StepScalars::kApply;
  params.num_updates = num_updates_1.const_data_ptr<double>();
  emulate_fused_update(params);
}

template <typename Rule>
void check_kernel(const Rule& rule) {
  const at::Tensor scalars = scalars_of(3e-3, 1e-3, 1),
                   num_updates = at::full({1}, 7.0, at::kDouble);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t elements : {64, 1024, 1088, 4032}) {
      const std::string what =
          fmt::format("{}, {} elements, gradients {}", Rule::kName, elements, c10::toString(dtype));
      FusedBucket exact = make_bucket<Rule>(elements, at::kDouble, at::kDouble),
                  reference = make_bucket<Rule>(elements, at::kFloat, dtype),
                  kernel = make_bucket<Rule>(elements, at::kFloat, dtype);
      test::reference_update(exact, rule, scalars, num_updates);
      test::reference_update(reference, rule, scalars, num_updates);
      emulate(kernel, rule, scalars, num_updates);
      expect_as_exact(kernel.values_n, reference.values_n, exact.values_n, what + ", values");
      for (std::size_t s = 0; s < Rule::kNumStates; ++s) {
        expect_as_exact(kernel.states_n[s], reference.states_n[s], exact.states_n[s],
                        what + ", " + Rule::kStateNames[s]);
      }
    }
  }
  // A step that is not applied.
  const FusedBucket before = make_bucket<Rule>(640, at::kFloat, at::kFloat),
                    after = make_bucket<Rule>(640, at::kFloat, at::kFloat);
  after.gradients_n.fill_(std::numeric_limits<float>::quiet_NaN());
  emulate(after, rule, scalars_of(3e-3, 1e-3, 0), num_updates);
  expect_same_bits(after.values_n, before.values_n, "values");
  for (std::size_t s = 0; s < Rule::kNumStates; ++s) {
    expect_same_bits(after.states_n[s], before.states_n[s], Rule::kStateNames[s]);
  }
}

TEST(EmulatedFusedUpdate, IsAsExactAsTheReferenceAndSkipsSteps) {
  check_kernel(kAdamW);
  check_kernel(kSgd);
  check_kernel(kNesterov);
}

}  // namespace
}  // namespace birkhoff
