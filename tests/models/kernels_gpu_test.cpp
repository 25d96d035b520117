// The GPU kernels of models/, against their references on the CPU.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <limits>

#include "cluster/base/tensors/rounded_linear.h"
#include "models/losses/fused_cross_entropy.h"
#include "tests/kernel_error.h"
#include "tests/models/activation/activation_check.h"
#include "tests/models/residual_norm/norm_check.h"

namespace birkhoff {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

struct Rows {
  at::Tensor logits_NV, targets_N, mask_N;
};

Rows make_rows(std::int64_t rows, std::int64_t vocabulary, at::ScalarType dtype) {
  return {(test_values({rows, vocabulary}, 1) * 20).to(dtype),
          (at::arange(rows, at::kLong) * 7919).remainder(vocabulary),
          at::arange(rows).remainder(5).ne(3).to(at::kByte)};
}

// `logits`: the kernel's copy of the logits, so that rows can be at odd addresses.
void check_cross_entropy(const Rows& rows, at::Tensor logits, const std::string& what,
                         double label_smoothing = 0) {
  at::Tensor exact_NV = rows.logits_NV.to(at::kDouble), reference_NV = rows.logits_NV.clone();
  const RowLosses exact =
      reference_cross_entropy_(exact_NV, rows.targets_N, rows.mask_N, label_smoothing);
  const RowLosses reference =
      reference_cross_entropy_(reference_NV, rows.targets_N, rows.mask_N, label_smoothing);
  const RowLosses kernel =
      fused_cross_entropy_(logits, rows.targets_N.cuda(), rows.mask_N.cuda(), label_smoothing);
  expect_as_exact(kernel.nats_N, reference.nats_N, exact.nats_N, what + ", nats");
  expect_as_exact(kernel.losses_N, reference.losses_N, exact.losses_N, what + ", losses");
  expect_as_exact(logits, reference_NV, exact_NV, what + ", gradients");
}

void check_cross_entropy(std::int64_t num_rows, std::int64_t vocabulary) {
  for (const at::ScalarType dtype : kDtypes) {
    const Rows rows = make_rows(num_rows, vocabulary, dtype);
    const std::string what =
        fmt::format("{} rows of {} {}", num_rows, vocabulary, c10::toString(dtype));
    const at::Tensor logits = rows.logits_NV.cuda();
    check_cross_entropy(rows, logits, what);
    const at::Tensor again = rows.logits_NV.cuda();
    fused_cross_entropy_(again, rows.targets_N.cuda(), rows.mask_N.cuda());
    expect_same_bits(again, logits, what + ", a second time");
    check_cross_entropy(rows, rows.logits_NV.cuda(), what + ", smoothed", 0.1);
  }
}

TEST(CrossEntropyKernel, SmallIsAsExactAsTheReference) {
  for (const std::int64_t vocabulary : {1, 5, 11, 256, 1000, 1024, 1025, 1032, 4099}) {
    for (const std::int64_t num_rows : {1, 3, 13}) check_cross_entropy(num_rows, vocabulary);
  }
}

TEST(CrossEntropyKernel, LargeIsAsExactAsTheReference) {
  check_cross_entropy(2048, 256);
  check_cross_entropy(300, 50257);
  check_cross_entropy(300, 50304);
}

TEST(CrossEntropyKernel, SmallRowsAtOddAddresses) {
  for (const at::ScalarType dtype : kDtypes) {
    const Rows rows = make_rows(4, 64, dtype);
    const at::Tensor memory = at::zeros({4 * 64 + 1}, rows.logits_NV.options().device(at::kCUDA));
    const at::Tensor logits = memory.narrow(0, 1, 4 * 64).view({4, 64});
    logits.copy_(rows.logits_NV);
    check_cross_entropy(rows, logits, "odd addresses");
    EXPECT_EQ(memory[0].item<double>(), 0);
  }
}

// Wide ranges, impossible tokens, and values that are not finite.
TEST(CrossEntropyKernel, SmallExtremeLogits) {
  Rows rows = make_rows(6, 40, at::kFloat);
  rows.mask_N.fill_(1);
  rows.targets_N.fill_(2);
  rows.logits_NV[0].mul_(1e4);
  rows.logits_NV[1].slice(0, 3).fill_(-std::numeric_limits<float>::infinity());
  rows.logits_NV[2].fill_(-3e38f);
  const at::Tensor logits = rows.logits_NV.cuda();
  check_cross_entropy(rows, logits, "extreme");

  const at::Tensor poisoned = rows.logits_NV.cuda();
  poisoned[4][7] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor targets_N = rows.targets_N.clone();
  targets_N[5] = 40;  // no such token
  const at::Tensor losses_N =
      fused_cross_entropy_(poisoned, targets_N.cuda(), rows.mask_N.cuda()).nats_N.cpu();
  EXPECT_FALSE(at::isnan(losses_N.narrow(0, 0, 4)).any().item<bool>());
  EXPECT_TRUE(at::isnan(losses_N.narrow(0, 4, 2)).all().item<bool>());
}

TEST(CrossEntropyKernel, SmallGradientsAreScaled) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::int64_t count : {1, 24, 1003, 3000000}) {
      const at::Tensor x = test_values({count}, 1).to(dtype);
      for (const float factor : {1.0f, 0.25f}) {
        const at::Tensor scaled = x.cuda();
        scale_gradients_(scaled, at::full({}, factor, scaled.options().dtype(at::kFloat)));
        expect_same_bits(scaled, x * factor, fmt::format("{} times {}", count, factor));
      }
    }
  }
}

// Not rounded to the dtype of the product's inputs.
TEST(RoundedLinear, SmallGradientsOfWeightsAreSumsInFp32) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x_NI = test_values({300, 64}, 1).to(dtype),
                     d_y_NO = test_values({300, 40}, 2).to(dtype),
                     weight_OI = test_values({40, 64}, 3).to(at::kFloat).cuda(),
                     bias_O = test_values({40}, 4).to(at::kFloat).cuda();
    const at::Tensor y = rounded_linear(x_NI.cuda(), weight_OI.set_requires_grad(true),
                                        bias_O.set_requires_grad(true));
    y.backward(d_y_NO.cuda());
    const at::Tensor exact_ON = d_y_NO.to(at::kDouble).t();
    expect_as_exact(weight_OI.grad(), exact_ON.mm(x_NI.to(at::kDouble)).to(at::kFloat),
                    exact_ON.mm(x_NI.to(at::kDouble)), "weight");
    expect_as_exact(bias_O.grad(), exact_ON.sum(1).to(at::kFloat), exact_ON.sum(1), "bias");
  }
}

TEST(ActivationKernel, SmallIsAsExactAsLibTorch) {
  const auto solve = [](const ActivationCase& c, const ActivationTensors& in) {
    const auto made = [&] {
      const at::Tensor x = in.x.detach().clone().set_requires_grad(true),
                       bias = in.bias.defined() ? in.bias.detach().clone().set_requires_grad(true)
                                                : at::Tensor();
      const at::Tensor y = activate(c.kind, x, bias);
      y.backward(in.d_y);
      return ActivationResults{y.detach(), x.grad(), bias.defined() ? bias.grad() : bias};
    };
    const ActivationResults first = made(), again = made();
    expect_same_bits(first.d_x, again.d_x, "d_x again");
    if (c.has_bias) expect_same_bits(first.d_bias, again.d_bias, "d_bias again");
    return first;
  };
  for (const ActivationKind kind : kActivationKinds) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const std::int64_t rows : {1, 257, 1030}) {
        check_activation({kind, rows, 520, dtype, rows != 257}, at::kCUDA, solve);
      }
      check_activation({kind, 3, 12, dtype}, at::kCUDA, solve);  // LibTorch's operations
    }
  }
}

void check_norm(const NormCase& c, at::Device reference_on = at::kCPU) {
  check_norm(c, at::kCUDA, reference_on, residual_norm, residual_norm_backward);
}

TEST(ResidualNormKernel, SmallIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const bool branch : {true, false}) {
      for (const std::int64_t channels : {8, 64, 128, 136, 512, 768, 1024, 2048, 4096, 8192}) {
        check_norm({3, channels, dtype, {branch, true}});
      }
      // Around the most parts that rows are summed in.
      for (const std::int64_t rows : {1, 511, 512, 513}) {
        check_norm({rows, 1024, dtype, {branch, rows != 512}});
      }
    }
  }
}

TEST(ResidualNormKernel, LargeIsAsExactAsTheReference) {
  for (const at::ScalarType dtype : kDtypes) check_norm({20000, 768, dtype});
}

// LibTorch operations take the shapes and addresses that no kernel takes.
TEST(ResidualNormKernel, SmallOtherShapesAreServedToo) {
  check_norm({5, 13, at::kFloat}, at::kCUDA);
  check_norm({2, 8200, at::kBFloat16}, at::kCUDA);
  check_norm({5, 64, at::kDouble}, at::kCUDA);
}

}  // namespace
}  // namespace birkhoff
