// Checks activations of x + bias, on a GPU or emulated, against LibTorch's operations in fp64.
#pragma once

#include <fmt/core.h>

#include <string>

#include "models/transformer/activation/activation.h"
#include "tests/kernel_error.h"

namespace birkhoff {

struct ActivationCase {
  ActivationKind kind;
  std::int64_t rows, width;
  at::ScalarType dtype;
  bool has_bias = true;

  std::int64_t columns() const { return kind == ActivationKind::kGeglu ? 2 * width : width; }
};

struct ActivationTensors {
  at::Tensor x, bias, d_y;  // bias in fp32 or fp64
};

struct ActivationResults {
  at::Tensor y, d_x, d_bias;  // d_bias is undefined without a bias
};

// The specification, in the tensors' dtypes.
inline ActivationResults activation_reference(const ActivationCase& c,
                                              const ActivationTensors& in) {
  const auto leaf = [](const at::Tensor& x) {
    return x.defined() ? x.detach().clone().set_requires_grad(true) : x;
  };
  const at::Tensor x = leaf(in.x), bias = leaf(in.bias);
  const at::Tensor sum = bias.defined() ? x + bias.to(x.scalar_type()) : x;
  at::Tensor y;
  if (c.kind == ActivationKind::kGeglu) {
    const auto halves = sum.chunk(2, -1);
    y = at::gelu(halves[0]) * halves[1];
  } else {
    y = c.kind == ActivationKind::kGelu ? at::gelu(sum) : at::relu(sum);
  }
  y.backward(in.d_y);
  return {y.detach(), x.grad(), bias.defined() ? bias.grad() : bias};
}

// `solve` takes the case and contiguous tensors on `device`.
template <typename Solve>
void check_activation(const ActivationCase& c, at::Device device, const Solve& solve) {
  const std::string what = fmt::format("kind {}, {} x {} of {}, bias {}", static_cast<int>(c.kind),
                                       c.rows, c.width, c10::toString(c.dtype), c.has_bias);
  // Sums from -6 to 6: both tails of gelu.
  const ActivationTensors given{
      (test_values({c.rows, c.columns()}, 1) * 6).to(c.dtype),
      c.has_bias ? test_values({c.columns()}, 2).to(at::kFloat) : at::Tensor(),
      test_values({c.rows, c.width}, 3).to(c.dtype)};
  const auto converted = [&](at::Device to, at::ScalarType dtype, at::ScalarType of_bias) {
    return ActivationTensors{given.x.to(to, dtype),
                             c.has_bias ? given.bias.to(to, of_bias) : at::Tensor(),
                             given.d_y.to(to, dtype)};
  };
  const ActivationResults exact = activation_reference(
                              c, converted(at::kCPU, at::kDouble, at::kDouble)),
                          reference = activation_reference(c, given),
                          made = solve(c, converted(device, c.dtype, at::kFloat));
  expect_as_exact(made.y, reference.y, exact.y, what + ", y");
  expect_as_exact(made.d_x, reference.d_x, exact.d_x, what + ", d_x");
  EXPECT_EQ(made.d_bias.defined(), c.has_bias) << what;
  if (!c.has_bias) return;
  EXPECT_EQ(made.d_bias.scalar_type(), at::kFloat) << what;
  expect_as_exact(made.d_bias, reference.d_bias, exact.d_bias, what + ", d_bias");
}

constexpr ActivationKind kActivationKinds[] = {ActivationKind::kRelu, ActivationKind::kGelu,
                                               ActivationKind::kGeglu};

}  // namespace birkhoff
