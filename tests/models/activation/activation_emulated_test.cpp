// The GPU kernels for activations, run on the CPU, and what a CPU computes instead.
#include <gtest/gtest.h>

#include <limits>

#include "cluster/base/gpu/device.h"
#include "tests/models/activation/activation_check.h"
#include "tests/models/activation/activation_emulated.h"

namespace birkhoff {
namespace {

// Memory that no kernel has written yet.
at::Tensor poisoned(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::full(sizes, std::numeric_limits<double>::quiet_NaN(), dtype);
}

ActivationResults emulated(const ActivationCase& c, const ActivationTensors& in) {
  ActivationResults made{
      poisoned({c.rows, c.width}, c.dtype), poisoned({c.rows, c.columns()}, c.dtype), {}};
  ActivationParams params{.kind = c.kind,
                          .dtype = kernel_dtype(in.x),
                          .rows = c.rows,
                          .width = static_cast<int>(c.width),
                          .x = in.x.const_data_ptr(),
                          .bias = c.has_bias ? in.bias.const_data_ptr<float>() : nullptr,
                          .y = made.y.mutable_data_ptr(),
                          .d_y = in.d_y.const_data_ptr(),
                          .d_x = made.d_x.mutable_data_ptr(),
                          .partials = nullptr};
  const at::Tensor partials = poisoned({params.parts(), c.columns()}, at::kFloat);
  if (c.has_bias) params.partials = partials.mutable_data_ptr<float>();
  emulate_activation(params);
  emulate_activation_backward(params);
  if (c.has_bias) made.d_bias = partials.sum(0);
  return made;
}

TEST(ActivationKernel, IsAsExactAsLibTorch) {
  for (const ActivationKind kind : kActivationKinds) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      // Rows around those of a part, and widths around those of a block.
      for (const std::int64_t rows : {1, 9, 255, 256, 257}) {
        check_activation({kind, rows, 24, dtype}, at::kCPU, emulated);
      }
      for (const std::int64_t width : {8, 120, 128, 136, 264}) {
        check_activation({kind, 11, width, dtype, width != 136}, at::kCPU, emulated);
      }
    }
  }
}

TEST(ActivationKernel, NaNStaysInItsRow) {
  for (const ActivationKind kind : kActivationKinds) {
    const ActivationCase c{kind, 3, 8, at::kFloat};
    ActivationTensors in{test_values({3, c.columns()}, 1).to(at::kFloat),
                         test_values({c.columns()}, 2).to(at::kFloat),
                         test_values({3, 8}, 3).to(at::kFloat)};
    in.x[1][2] = std::numeric_limits<float>::quiet_NaN();
    const ActivationResults made = emulated(c, in);
    for (const at::Tensor& x : {made.y, made.d_x}) {
      EXPECT_TRUE(x[1][2].isnan().item<bool>() || kind == ActivationKind::kRelu);
      EXPECT_FALSE(x[0].isnan().any().item<bool>());
      EXPECT_FALSE(x[2].isnan().any().item<bool>());
    }
    EXPECT_TRUE(made.y[1][2].isnan().item<bool>());
  }
}

// LibTorch's operations, in the order of the specification.
TEST(Activation, OfACpuIsLibTorchs) {
  for (const ActivationKind kind : kActivationKinds) {
    check_activation({kind, 5, 24, at::kDouble}, at::kCPU,
                     [](const ActivationCase& c, const ActivationTensors& in) {
                       const at::Tensor x = in.x.clone().set_requires_grad(true),
                                        bias = in.bias.clone().set_requires_grad(true);
                       const at::Tensor y = activate(c.kind, x, bias);
                       y.backward(in.d_y);
                       return ActivationResults{y.detach(), x.grad(), bias.grad()};
                     });
  }
}

}  // namespace
}  // namespace birkhoff
