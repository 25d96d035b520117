// Compares the update of a flat bucket with the optimizer that CPU training uses: the kernel is
// measured by this reference (update_kernels_gpu_test.cpp).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "configs/schema/config.pb.h"
#include "runtime/optimizers/adamw.h"
#include "runtime/optimizers/gpu_adamw.h"
#include "tests/kernel_error.h"
#include "tests/runtime/optimizers/adamw_reference.h"

namespace birkhoff {
namespace {

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

TEST(AdamW, EqualsTheReferenceThatTheKernelIsComparedWith) {
  Parameters parameters(5, at::kDouble);
  parameters.add("matrix", {11, 13}, Initializer::normal(0.3), true);
  parameters.add("bias", {13}, Initializer::normal(0.2), false);
  parameters.add("stack", {2, 70}, Initializer::normal(0.1), true);
  const std::unique_ptr<ProcessGroup> group = make_single_group();
  GradBuckets buckets(parameters, *group, /*bucket_elements=*/1 << 20);
  ASSERT_EQ(buckets.buckets().size(), 1u);
  GradBucket& bucket = buckets.buckets()[0];
  configs::AdamW config;
  config.set_beta1(0.875f);
  config.set_beta2(0.96875f);
  config.set_epsilon(0.0009765625f);
  config.set_weight_decay(0.125f);
  AdamW optimizer(config, buckets);

  FusedAdamWBucket fused{.values_n = bucket.values.clone(),
                         .gradients_n = {},
                         .m_n = at::zeros_like(bucket.values),
                         .v_n = at::zeros_like(bucket.values),
                         .decayed_G = decay_flags(bucket)};
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
    test::reference_adamw(fused, {0.875, 0.96875, 0.0009765625, 0.125},
                          scalars_of(0.01 / step, 0.5, apply ? 1 : 0), num_updates);
    for (const GradBucket::Slot& slot : bucket.slots) {
      const at::Tensor difference = fused.values_n.narrow(0, slot.offset, slot.elements) -
                                    bucket.values.narrow(0, slot.offset, slot.elements);
      EXPECT_LT(difference.abs().max().item<double>(), 1e-14) << "step " << step << slot.name;
    }
  }
}

}  // namespace
}  // namespace birkhoff
