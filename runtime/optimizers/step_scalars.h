// The scalars of one optimizer step, in one tensor. Operations on a GPU read them from its memory
// and never take them by value, so that a captured step replays with new values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace birkhoff {

class StepScalars {
 public:
  enum Index {
    kLearningRate,
    kGradientScale,  // clip factor / number of counted targets: turns summed gradients into clipped
                     // means
    kApply,  // 1: the step is finite and is applied; 0: parameters and optimizer state stay as they
             // are
    kLossScale,  // the loss counts so many times in the gradients (runtime/gradients/loss_scale.h)
    kNoiseStep,  // holds an int64
    kNumScalars
  };

  // `device`: of the computation.
  explicit StepScalars(at::Device device = at::kCPU)
      : values_(at::zeros({kNumScalars},
                          at::TensorOptions(at::kDouble).pinned_memory(device.is_cuda()))),
        on_device_(device.is_cpu()
                       ? values_
                       : at::zeros({kNumScalars}, at::TensorOptions(at::kDouble).device(device))) {}

  // The host's values. The device has them after publish().
  void set(Index index, double value) { values_.mutable_data_ptr<double>()[index] = value; }
  double get(Index index) const { return values_.const_data_ptr<double>()[index]; }
  void set_noise_step(std::int64_t step) {
    noise_step_of(values_).mutable_data_ptr<std::int64_t>()[0] = step;
  }
  // What is put into the current stream from now on reads the values that are set now. Does not
  // wait: a value may be set again once the stream has passed, or nothing more reads it.
  void publish() {
    if (!on_device_.is_same(values_)) on_device_.copy_(values_, /*non_blocking=*/true);
  }

  // fp64 [kNumScalars] on the device.
  const at::Tensor& on_device() const { return on_device_; }
  // 0-dim, of a loss' dtype: the gradient that its backward pass begins with.
  at::Tensor loss_scale(at::ScalarType dtype) const {
    return on_device_.select(0, kLossScale).to(dtype);
  }
  // int64 [1], a view of the element kNoiseStep on the device: what a NoiseKey takes.
  at::Tensor noise_step() const { return noise_step_of(on_device_); }

 private:
  static at::Tensor noise_step_of(const at::Tensor& values) {
    return values.narrow(0, kNoiseStep, 1).view(at::kLong);
  }

  at::Tensor values_, on_device_;  // fp64 [kNumScalars]; one tensor on the CPU
};

}  // namespace birkhoff
