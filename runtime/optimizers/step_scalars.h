// The scalars of one optimizer step, in one tensor. GPU operations read them from device memory and
// never take them by value, so a captured step replays with new values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace birkhoff {

class StepScalars {
 public:
  enum Index {
    kLearningRate,
    // clip factor / counted targets / loss scale: turns summed gradients into clipped means
    kGradientScale,
    // 1: the step is finite and is applied; 0: parameters and optimizer state stay as they are
    kApply,
    kLossScale,  // multiplies the loss before the backward pass (runtime/gradients/loss_scale.h)
    kNoiseStep,  // holds an int64
    kNumScalars
  };

  // `device`: where the computation runs.
  explicit StepScalars(at::Device device = at::kCPU)
      : values_(at::zeros({kNumScalars},
                          at::TensorOptions(at::kDouble).pinned_memory(device.is_cuda()))),
        on_device_(device.is_cpu()
                       ? values_
                       : at::zeros({kNumScalars}, at::TensorOptions(at::kDouble).device(device))) {}

  // The host's values. The device gets them in publish().
  void set(Index index, double value) { values_.mutable_data_ptr<double>()[index] = value; }
  double get(Index index) const { return values_.const_data_ptr<double>()[index]; }
  void set_noise_step(std::int64_t step) {
    noise_step_of(values_).mutable_data_ptr<std::int64_t>()[0] = step;
  }
  // Work queued on the current stream from now on reads the values set now. Does not wait: set a
  // value again only after the stream has passed this point, or if nothing reads it any more.
  void publish() {
    if (!on_device_.is_same(values_)) on_device_.copy_(values_, /*non_blocking=*/true);
  }

  // fp64 [kNumScalars] on the device.
  const at::Tensor& on_device() const { return on_device_; }
  // 0-dim, of the loss's dtype: the gradient that starts the backward pass.
  at::Tensor loss_scale(at::ScalarType dtype) const {
    return on_device_.select(0, kLossScale).to(dtype);
  }
  // int64 [1], a view of element kNoiseStep on the device, for a NoiseKey.
  at::Tensor noise_step() const { return noise_step_of(on_device_); }

 private:
  static at::Tensor noise_step_of(const at::Tensor& values) {
    return values.narrow(0, kNoiseStep, 1).view(at::kLong);
  }

  at::Tensor values_, on_device_;  // fp64 [kNumScalars]; one tensor on the CPU
};

}  // namespace birkhoff
