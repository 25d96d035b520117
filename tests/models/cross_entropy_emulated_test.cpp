// The GPU kernels of the fused cross entropy, run on the CPU, against the specification: rows for
// each team size, kept in shared memory and not.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <limits>

#include "models/losses/fused_cross_entropy.h"
#include "tests/kernel_error.h"
#include "tests/models/cross_entropy_emulated.h"

namespace birkhoff {
namespace {

constexpr int kShared = 232448, kLittleShared = 1024;

KernelDtype dtype_of(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat  ? KernelDtype::kFloat
         : x.scalar_type() == at::kHalf ? KernelDtype::kHalf
                                        : KernelDtype::kBFloat16;
}

RowLosses emulate(const at::Tensor& logits_NV, const at::Tensor& targets_N,
                  const at::Tensor& mask_N, int shared_limit, float label_smoothing = 0) {
  const at::Tensor nats_N = at::full({logits_NV.size(0)}, 77, at::kFloat),
                   losses_N = at::full({logits_NV.size(0)}, 77, at::kFloat);
  emulate_fused_cross_entropy(
      {.logits = logits_NV.mutable_data_ptr(),
       .dtype = dtype_of(logits_NV),
       .targets = targets_N.const_data_ptr<std::int64_t>(),
       .mask = mask_N.const_data_ptr<std::uint8_t>(),
       .nats = nats_N.mutable_data_ptr<float>(),
       .losses = losses_N.mutable_data_ptr<float>(),
       .label_smoothing = label_smoothing,
       .rows = logits_NV.size(0),
       .vocabulary = logits_NV.size(1),
       .vectors = logits_NV.size(1) * static_cast<std::int64_t>(logits_NV.itemsize()) % 16 == 0},
      shared_limit);
  return {nats_N, losses_N};
}

TEST(EmulatedCrossEntropy, IsAsExactAsTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t vocabulary : {1, 11, 256, 1024, 1025, 1032, 9001, 18000}) {
      const at::Tensor logits_NV = (test_values({5, vocabulary}, 1) * 20).to(dtype);
      const at::Tensor targets_N = (at::arange(5, at::kLong) * 7919).remainder(vocabulary);
      const at::Tensor mask_N = at::arange(5).ne(3).to(at::kByte);
      for (const float smoothing : {0.0F, 0.1F}) {
        at::Tensor exact_NV = logits_NV.to(at::kDouble), reference_NV = logits_NV.clone();
        const auto exact = reference_cross_entropy_(exact_NV, targets_N, mask_N, smoothing),
                   reference = reference_cross_entropy_(reference_NV, targets_N, mask_N, smoothing);
        for (const int shared_limit : {kShared, kLittleShared}) {
          const std::string what = fmt::format("{} {}, smoothing {}, shared {}", vocabulary,
                                               c10::toString(dtype), smoothing, shared_limit);
          const at::Tensor made_NV = logits_NV.clone();
          const RowLosses made = emulate(made_NV, targets_N, mask_N, shared_limit, smoothing);
          expect_as_exact(made.nats_N, reference.nats_N, exact.nats_N, what + ", nats");
          expect_as_exact(made_NV, reference_NV, exact_NV, what + ", gradients");
          if (smoothing > 0) {
            expect_as_exact(made.losses_N, reference.losses_N, exact.losses_N, what + ", losses");
          }
        }
      }
    }
  }
}

TEST(EmulatedCrossEntropy, ImpossibleTargetsAndWhatIsNoNumber) {
  for (const std::int64_t vocabulary : {40, 2000}) {
    at::Tensor logits_NV = test_values({3, vocabulary}, 2).to(at::kFloat);
    logits_NV[0][7] = std::numeric_limits<float>::quiet_NaN();
    logits_NV[1].slice(0, 3).fill_(-std::numeric_limits<float>::infinity());
    const auto [nats_N, losses_N] =
        emulate(logits_NV, at::tensor({1, 2, static_cast<int>(vocabulary)}, at::kLong),
                at::ones({3}, at::kByte), kShared, 0.1F);
    EXPECT_TRUE(std::isnan(nats_N[0].item<float>()));
    EXPECT_FALSE(std::isnan(nats_N[1].item<float>()));
    EXPECT_TRUE(std::isnan(nats_N[2].item<float>()));
    EXPECT_TRUE(std::isnan(losses_N[0].item<float>()));
    EXPECT_TRUE(std::isinf(losses_N[1].item<float>()));  // some ids have no probability
    EXPECT_TRUE(std::isnan(losses_N[2].item<float>()));
  }
}

TEST(EmulatedScale, MultipliesUnlessByOne) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t count : {1, 24, 1003}) {
      const at::Tensor x = test_values({count}, 1).to(dtype);
      for (const float factor : {1.0f, 0.25f}) {
        const at::Tensor scaled = x.clone(), device_factor = at::full({}, factor, at::kFloat);
        emulate_scale({.x = scaled.mutable_data_ptr(),
                       .dtype = dtype_of(x),
                       .factor = device_factor.const_data_ptr<float>(),
                       .count = count,
                       .vectors = count * static_cast<std::int64_t>(x.itemsize()) % 16 == 0});
        EXPECT_TRUE(at::equal(scaled, x * factor)) << dtype << count << factor;
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff
