// Error bound for kernels: at most twice the error of the reference in the same precision. Tests
// whose names begin with Small also run under compute-sanitizer.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

namespace birkhoff {

// Values up to about 1 over several orders of magnitude, the same on all machines; fp64 on the CPU.
inline at::Tensor test_values(at::IntArrayRef shape, double phase) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  const at::Tensor i = at::arange(count, at::kDouble);
  return (at::sin(i * 0.7 + phase) * at::exp2(-(i + phase).remainder(7))).view(shape);
}

// `exact` is the reference in fp64. atol is one rounding error of the largest value in the
// precision of `reference`, because a kernel need not be exact where the reference happens to be.
// `more` is added to the bound.
inline void expect_as_exact(const at::Tensor& kernel, const at::Tensor& reference,
                            const at::Tensor& exact, const std::string& what, double more = 0) {
  ASSERT_EQ(kernel.scalar_type(), reference.scalar_type()) << what;
  ASSERT_EQ(kernel.sizes(), exact.sizes()) << what;
  if (kernel.numel() == 0) return;
  const auto error = [&](const at::Tensor& tensor) {
    return (tensor.cpu().to(at::kDouble) - exact).abs().max().item<double>();
  };
  const double epsilon = reference.scalar_type() == at::kBFloat16 ? 0x1p-8
                         : reference.scalar_type() == at::kHalf   ? 0x1p-11
                                                                  : 0x1p-22;
  const double atol = epsilon * exact.abs().max().item<double>();
  EXPECT_LE(error(kernel), 2 * error(reference) + atol + more) << what;
}

inline void expect_same_bits(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  EXPECT_TRUE(at::equal(a.cpu(), b.cpu())) << what;
}

}  // namespace birkhoff
