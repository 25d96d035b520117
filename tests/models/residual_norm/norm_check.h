// Checks kernels for residual addition and layer norm, on a GPU or emulated, against their
// specification.
#pragma once

#include <fmt/core.h>

#include <array>

#include "models/transformer/residual_norm.h"
#include "tests/kernel_error.h"

namespace birkhoff {

struct NormCase {
  std::int64_t rows, channels;
  at::ScalarType branch;
  ResidualNormTerms terms{.branch = true, .bias = true};
};

struct NormTensors {
  at::Tensor x, y, weight, bias, d_sum, d_normed;

  // On a device, the stream in fp32, or in the branch's dtype if that is wider.
  NormTensors converted(at::ScalarType branch, at::Device device) const {
    const at::ScalarType stream = branch == at::kDouble ? at::kDouble : at::kFloat;
    const auto convert = [&](const at::Tensor& tensor, at::ScalarType dtype) {
      return tensor.defined() ? tensor.to(device, dtype) : tensor;
    };
    return {convert(x, stream),    convert(y, branch),     convert(weight, stream),
            convert(bias, stream), convert(d_sum, stream), convert(d_normed, branch)};
  }
};

inline NormTensors norm_tensors(const NormCase& c) {
  const std::array<std::int64_t, 2> sizes = {c.rows, c.channels};
  const auto if_used = [](bool used, const at::Tensor& tensor) {
    return used ? tensor : at::Tensor();
  };
  return {test_values(sizes, 1) + 3,
          if_used(c.terms.branch, test_values(sizes, 2)),
          test_values({c.channels}, 3) + 1,
          if_used(c.terms.bias, test_values({c.channels}, 4)),
          test_values(sizes, 5),
          test_values(sizes, 6)};
}

// norm and norm_backward: the kernels, called like residual_norm() and residual_norm_backward()
// with tensors on `device`.
template <typename Norm, typename NormBackward>
void check_norm(const NormCase& c, at::Device device, at::Device reference_on, const Norm& norm,
                const NormBackward& norm_backward) {
  constexpr double kEpsilon = 1e-5;
  const std::string what = fmt::format("{} x {} of {}, branch {}, bias {}", c.rows, c.channels,
                                       c10::toString(c.branch), c.terms.branch, c.terms.bias);
  const NormTensors given = norm_tensors(c).converted(c.branch, reference_on);
  const NormTensors wide = given.converted(at::kDouble, at::kCPU);
  const NormTensors on_device = given.converted(c.branch, device);
  const ResidualNorm reference =
      reference_residual_norm(given.x, given.y, given.weight, given.bias, kEpsilon, c.branch);
  // The exact result starts from the rounded sum, as kernel and reference do.
  const ResidualNorm exact =
      reference_residual_norm(reference.sum_NC.to(at::kCPU, at::kDouble), at::Tensor(), wide.weight,
                              wide.bias, kEpsilon, at::kDouble);
  const ResidualNorm kernel =
      norm(on_device.x, on_device.y, on_device.weight, on_device.bias, kEpsilon, c.branch);
  expect_same_bits(kernel.sum_NC, reference.sum_NC, what + ", sum");
  expect_as_exact(kernel.normed_NC, reference.normed_NC, exact.normed_NC, what + ", normed");
  expect_as_exact(kernel.mean_N, reference.mean_N, exact.mean_N, what + ", mean");
  expect_as_exact(kernel.rstd_N, reference.rstd_N, exact.rstd_N, what + ", rstd");

  const ResidualNormGradients exact_gradients =
      reference_residual_norm_backward(wide.d_sum, wide.d_normed, exact, wide.weight, c.terms);
  const ResidualNormGradients reference_gradients = reference_residual_norm_backward(
      given.d_sum, given.d_normed, reference, given.weight, c.terms);
  const auto gradients_of_kernel = [&] {
    return norm_backward(on_device.d_sum, on_device.d_normed, kernel, on_device.weight, c.terms);
  };
  const ResidualNormGradients gradients = gradients_of_kernel();
  expect_as_exact(gradients.d_x_NC, reference_gradients.d_x_NC, exact_gradients.d_x_NC,
                  what + ", dx");
  EXPECT_EQ(gradients.d_y_NC.defined(), c.terms.branch);
  if (c.terms.branch) {
    expect_as_exact(gradients.d_y_NC, reference_gradients.d_y_NC, exact_gradients.d_x_NC,
                    what + ", dy");
  }
  expect_as_exact(gradients.d_weight_C, reference_gradients.d_weight_C, exact_gradients.d_weight_C,
                  what + ", dw");
  EXPECT_EQ(gradients.d_bias_C.defined(), c.terms.bias);
  if (c.terms.bias) {
    expect_as_exact(gradients.d_bias_C, reference_gradients.d_bias_C, exact_gradients.d_bias_C,
                    what + ", db");
  }
  expect_same_bits(gradients_of_kernel().d_weight_C, gradients.d_weight_C,
                   what + ", a second time");
}

}  // namespace birkhoff
