// The scalars of one optimizer step, in one tensor. Operations read them from memory and never take
// them by value, so that a captured step replays with new values.
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
    kNoiseStep,  // holds an int64
    kNumScalars
  };

  StepScalars() : values_(at::zeros({kNumScalars}, at::kDouble)) {}

  void set(Index index, double value) { values_.mutable_data_ptr<double>()[index] = value; }
  double get(Index index) const { return values_.const_data_ptr<double>()[index]; }
  // 0-dim fp64 view.
  at::Tensor at(Index index) const { return values_.select(0, index); }

  // int64 [1], a view of the element kNoiseStep: what a NoiseKey takes.
  at::Tensor noise_step() const { return values_.narrow(0, kNoiseStep, 1).view(at::kLong); }
  void set_noise_step(std::int64_t step) {
    noise_step().mutable_data_ptr<std::int64_t>()[0] = step;
  }

 private:
  at::Tensor values_;  // fp64 [kNumScalars]
};

}  // namespace birkhoff
