// Parts of a step as CUDA graphs: the same bits as without, whatever changes in memory between
// replays. Whole training runs: tests/launcher/train_gpu_test.cpp.
#include "runtime/step_graph.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/random/philox.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/gradients/grad_norm.h"
#include "runtime/optimizers/step_scalars.h"

namespace birkhoff {
namespace {

// A network with noise, its gradients in buckets, their norm and an update; one batch per step.
class Steps {
 public:
  Steps(at::Device device, bool recorded)
      : device_(device),
        group_(make_single_group(device)),
        parameters_(3, at::kFloat, at::kFloat, device),
        first_(parameters_.add("first", {64, 32}, Initializer::normal(0.2), true)),
        second_(parameters_.add("second", {5, 64}, Initializer::normal(0.2), true)),
        buckets_(parameters_, *group_, /*bucket_elements=*/1024),
        scalars_(device),
        gradients_(recorded, device),
        norm_(recorded, device),
        update_(recorded, device) {}

  // The norm of the step's gradients.
  double step(std::int64_t number) {
    Batch batch;
    batch.fields["x"] = (at::arange(8 * 32, at::kFloat).view({8, 32}) * (0.01 * number)).cos();
    batch.sample_ids_B = at::arange(8, at::kLong) + 8 * number;
    scalars_.set_noise_step(number);
    scalars_.set(StepScalars::kLossScale, 1 << number);
    scalars_.publish();
    gradients_.run([this, batch = batch_.hold(batch.to(device_))] {
      buckets_.zero_gradients();
      const NoiseKey noise{7, scalars_.noise_step(), 0, batch.sample_ids_B};
      const at::Tensor hidden = philox_dropout(at::matmul(batch.at("x"), first_.t()).tanh(), 0.3f,
                                               noise, NoisePurpose::kActivationDropout);
      const at::Tensor loss = at::matmul(hidden, second_.t()).square().sum();
      loss.backward(scalars_.loss_scale(at::kFloat));
    });
    norm_.run([this] { sums_ = gradient_chunk_sums(buckets_); });
    const double norm = norm_of_chunk_sums(buckets_, sums_);
    scalars_.set(StepScalars::kLearningRate, 0.01 / static_cast<double>(number));
    scalars_.publish();
    update_.run([this] {
      const at::Tensor rate = scalars_.on_device().select(0, StepScalars::kLearningRate);
      for (auto& bucket : buckets_.buckets()) {
        bucket.values.sub_(bucket.gradients.sign() * rate.to(at::kFloat));
      }
    });
    return norm;
  }

  at::Tensor values() const {
    return at::cat({first_.detach().flatten(), second_.detach().flatten()}).cpu();
  }

 private:
  const at::Device device_;
  std::unique_ptr<ProcessGroup> group_;
  Parameters parameters_;
  at::Tensor first_, second_, sums_;
  GradBuckets buckets_;
  StepScalars scalars_;
  StaticBatch batch_;
  StepGraph gradients_, norm_, update_;
};

TEST(StepGraph, SmallRecordedStepsHaveTheSameBits) {
  const at::Device device = cuda_device(0);
  Steps plain(device, false), recorded(device, true);
  std::vector<double> norms;
  for (std::int64_t number = 1; number <= StepGraph::kWarmUpRuns + 6; ++number) {
    norms.push_back(plain.step(number));
    EXPECT_EQ(recorded.step(number), norms.back()) << "step " << number;
    // Memory that is allocated and freed between replays, as by an evaluation.
    EXPECT_EQ(at::ones({1 << 18}, device).sum().item<float>(), 1 << 18);
  }
  EXPECT_NE(norms[4], norms[5]);
  EXPECT_TRUE(at::equal(recorded.values(), plain.values()));
}

TEST(StepGraph, WhatCannotBeRecordedIsSaidAndLeavesTheDeviceUsable) {
  const at::Device device = cuda_device(0);
  StepGraph graph(true, device);
  const at::Tensor x = at::ones({3}, device);
  const auto waits = [&] { x.add_(x.sum().item<float>()); };
  for (int i = 0; i < StepGraph::kWarmUpRuns; ++i) graph.run(waits);
  try {
    graph.run(waits);
    FAIL() << "a part that waits for the device was recorded";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kInternal);
    EXPECT_THAT(error.what(), testing::HasSubstr("train.cuda_graph"));
  }
  EXPECT_EQ(at::ones({3}, device).sum().item<float>(), 3);
}

}  // namespace
}  // namespace birkhoff
