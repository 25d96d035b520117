// Legend: I inputs, O outputs.
#include "cluster/base/tensors/rounded_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/kernel_error.h"

namespace birkhoff {
namespace {

at::Tensor leaf(at::IntArrayRef sizes, double phase, at::ScalarType dtype, bool differentiable) {
  return test_values(sizes, phase).to(dtype).set_requires_grad(differentiable);
}

// y, then the gradients of the leaves that are differentiable.
std::vector<at::Tensor> results(const at::Tensor& y, const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& x : leaves) {
    if (x.defined() && x.requires_grad()) wanted.push_back(x);
  }
  std::vector<at::Tensor> all =
      torch::autograd::grad({y}, wanted, {test_values(y.sizes(), 9).to(y.scalar_type())});
  all.insert(all.begin(), y.detach());
  return all;
}

// On a CPU, LibTorch's own products with rounded copies are the same.
TEST(RoundedLinear, IsALinearMapOfRoundedCopies) {
  const std::vector<std::vector<std::int64_t>> shapes{{6, 32}, {2, 5, 32}, {2, 3, 4, 32}};
  for (const auto& shape : shapes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const bool with_bias : {false, true}) {
        for (const int fixed : {-1, 0, 1}) {  // none, x or the weight is not differentiable
          const at::Tensor x = leaf(shape, 1, dtype, fixed != 0),
                           weight_OI = leaf({24, 32}, 2, at::kFloat, fixed != 1),
                           bias_O = with_bias ? leaf({24}, 3, at::kFloat, true) : at::Tensor();
          const std::optional<at::Tensor> bias =
              with_bias ? std::optional(bias_O.to(dtype)) : std::nullopt;
          const auto expected =
                         results(at::linear(x, weight_OI.to(dtype), bias), {x, weight_OI, bias_O}),
                     made = results(rounded_linear(x, weight_OI, bias_O), {x, weight_OI, bias_O});
          ASSERT_EQ(made.size(), expected.size());
          for (std::size_t i = 0; i < made.size(); ++i) {
            EXPECT_EQ(made[i].scalar_type(), expected[i].scalar_type());
            // LibTorch may multiply transposed matrices instead, whose sums it rounds differently.
            const double of_rounding =
                dtype == at::kFloat ? 0 : 0x1p-7 * expected[i].abs().max().item<double>();
            EXPECT_LE((made[i] - expected[i]).abs().max().item<double>(), of_rounding)
                << shape.size() << " dims, bias " << with_bias << ", fixed " << fixed << ", result "
                << i;
          }
        }
      }
    }
  }
}

TEST(RoundedLinear, TakesRowsInAnyOrder) {
  const auto solve = [](at::ScalarType dtype, at::ScalarType stored, bool with_bias, bool ours) {
    const at::Tensor
        x = leaf({5, 2, 32}, 1, at::kBFloat16, false).to(dtype).set_requires_grad(true),
        weight_OI = leaf({24, 32}, 2, at::kBFloat16, false).to(stored).set_requires_grad(true),
        bias_O = with_bias ? leaf({24}, 3, stored, true) : at::Tensor(), rows = x.transpose(0, 1);
    const std::optional<at::Tensor> bias =
        with_bias ? std::optional(bias_O.to(dtype)) : std::nullopt;
    return results(ours ? rounded_linear(rows, weight_OI, bias_O)
                        : at::linear(rows, weight_OI.to(dtype), bias),
                   {x, weight_OI, bias_O});
  };
  for (const bool with_bias : {false, true}) {
    const auto exact = solve(at::kDouble, at::kDouble, with_bias, false),
               reference = solve(at::kBFloat16, at::kFloat, with_bias, false),
               made = solve(at::kBFloat16, at::kFloat, with_bias, true);
    for (std::size_t i = 0; i < made.size(); ++i) {
      const double of_bf16 = 0x1p-8 * exact[i].abs().max().item<double>();
      expect_as_exact(made[i], reference[i], exact[i], std::to_string(i), of_bf16);
    }
  }
}

TEST(RoundedLinear, WithoutGradientsIsTheSame) {
  const at::Tensor x = leaf({5, 32}, 1, at::kBFloat16, false),
                   weight_OI = leaf({24, 32}, 2, at::kFloat, true);
  const at::Tensor y = rounded_linear(x, weight_OI, {});
  const at::NoGradGuard no_gradients;
  EXPECT_TRUE(at::equal(rounded_linear(x, weight_OI, {}), y));
}

}  // namespace
}  // namespace birkhoff
