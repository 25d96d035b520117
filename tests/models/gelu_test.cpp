// GELU's kernels, emulated and of this CPU, and its operator, against at::gelu.
#include "models/transformer/activation/activation.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <string>
#include <vector>

#include "cluster/base/instruction_set.h"
#include "tests/kernel_error.h"
#include "tests/models/gelu_emulated.h"

namespace birkhoff::test {
namespace {

// Calls f(T, kernels, dtype, name).
template <typename F>
void for_each_kernels(const F& f) {
  const auto with_type = [&](auto number, at::ScalarType dtype) {
    using T = decltype(number);
    f(number, emulated_gelu_kernels(number), dtype, "emulated");
    if (is_supported(InstructionSet::kAvx512Bf16)) {
      f(number, gelu_kernels<T>(), dtype, "of this CPU");
    }
  };
  with_type(float{}, at::kFloat);
  with_type(Bf16{}, at::kBFloat16);
}

template <typename T>
at::Tensor forward(const GeluKernels<T>& kernels, const at::Tensor& x) {
  const at::Tensor y = at::empty_like(x);
  kernels.forward(static_cast<const T*>(x.const_data_ptr()), static_cast<std::size_t>(x.numel()),
                  static_cast<T*>(y.mutable_data_ptr()));
  return y;
}
template <typename T>
at::Tensor backward(const GeluKernels<T>& kernels, const at::Tensor& d_y, const at::Tensor& x) {
  const at::Tensor d_x = at::empty_like(x);
  kernels.backward(static_cast<const T*>(x.const_data_ptr()),
                   static_cast<const T*>(d_y.const_data_ptr()), static_cast<std::size_t>(x.numel()),
                   static_cast<T*>(d_x.mutable_data_ptr()));
  return d_x;
}

TEST(Gelu, KernelsAreAsExactAsLibTorch) {
  // In the tail (1 + erf) / 2 is little more than the rounding of erf. There the kernels' error is
  // 3.5e-8. That of LibTorch is 1.5e-8 with AVX2 and at least 1.7e-8 with AVX-512, where the
  // kernels run.
  constexpr double kErfRounding = 0x1p-26;
  for_each_kernels([&](auto, const auto& kernels, at::ScalarType dtype, const std::string& name) {
    for (const auto& [first, last] :
         {std::pair{-0.01, 0.01}, std::pair{-1.0, 0.5}, std::pair{-3.0, -1.0},
          std::pair{-7.0, -5.5}, std::pair{0.5, 7.0}, std::pair{-300.0, 300.0}}) {
      const at::Tensor x = at::linspace(first, last, 20011, at::kDouble).to(dtype);
      const at::Tensor d_y = test_values({x.numel()}, 1).to(dtype);
      const at::Tensor wide = x.to(at::kDouble);
      const std::string what = name + ", from " + std::to_string(first);
      expect_as_exact(forward(kernels, x), at::gelu(x), at::gelu(wide), what);
      expect_as_exact(backward(kernels, d_y, x), at::gelu_backward(d_y, x),
                      at::gelu_backward(d_y.to(at::kDouble), wide), what + ", backward",
                      kErfRounding);
    }
  });
}

TEST(Gelu, KernelsKeepNanAndTheEnds) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for_each_kernels([&](auto, const auto& kernels, at::ScalarType dtype, const std::string& name) {
    const at::Tensor x = at::tensor({kNan, kInfinity, 1e30f, 6.0f, -1e30f, 0.0f, 1e-30f}).to(dtype);
    const at::Tensor y = forward(kernels, x);
    EXPECT_TRUE(y[0].isnan().item<bool>()) << name;
    EXPECT_TRUE(at::equal(y.narrow(0, 1, 3), x.narrow(0, 1, 3))) << name << y;
    EXPECT_EQ(y[4].item<float>(), 0) << name;
    EXPECT_EQ(y[5].item<float>(), 0) << name;
    EXPECT_EQ(y[6].item<float>(), (x[6] / 2).item<float>()) << name;
    const at::Tensor d_x = backward(kernels, at::ones_like(x), x);
    EXPECT_TRUE(d_x[0].isnan().item<bool>()) << name;
    EXPECT_TRUE(at::equal(d_x.narrow(0, 1, 6), at::tensor({1., 1., 1., 0., .5, .5}).to(dtype)))
        << name << d_x;
  });
}

// The bits of an element depend neither on how many there are nor on where it is.
TEST(Gelu, KernelsTakeAnyNumberOfElements) {
  for_each_kernels([](auto, const auto& kernels, at::ScalarType dtype, const std::string& name) {
    const at::Tensor x = test_values({67}, 3).mul(4).to(dtype),
                     d_y = test_values({67}, 5).to(dtype);
    const at::Tensor y = forward(kernels, x), d_x = backward(kernels, d_y, x);
    for (const std::int64_t first : {0, 1, 5, 16}) {
      for (const std::int64_t count : {0, 1, 15, 16, 17, 33, 51}) {
        const auto part = [&](const at::Tensor& of) {
          return of.narrow(0, first, count).contiguous();
        };
        EXPECT_TRUE(at::equal(forward(kernels, part(x)), part(y))) << name << count;
        EXPECT_TRUE(at::equal(backward(kernels, part(d_y), part(x)), part(d_x))) << name << count;
      }
    }
  });
}

TEST(Gelu, OperatorDifferentiatesAnyTensor) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const bool contiguous : {true, false}) {
      at::Tensor x = test_values({400, 300}, 2).mul(3).to(dtype);
      at::Tensor d_y = test_values({400, 300}, 4).to(dtype);
      if (!contiguous) {
        x = x.t();
        d_y = d_y.t();
      }
      const auto solve = [&](auto operation, at::ScalarType in) {
        const at::Tensor leaf = x.to(in).detach().requires_grad_(true);
        const at::Tensor y = operation(leaf);
        return std::pair{y.detach(), torch::autograd::grad({y}, {leaf}, {d_y.to(in)})[0]};
      };
      const auto library = [](const at::Tensor& each) { return at::gelu(each); };
      const auto [y, d_x] = solve(birkhoff::gelu, dtype);
      const auto [reference_y, reference_d_x] = solve(library, dtype);
      const auto [exact_y, exact_d_x] = solve(library, at::kDouble);
      expect_as_exact(y, reference_y, exact_y, "forward");
      expect_as_exact(d_x, reference_d_x, exact_d_x, "backward");
    }
  }
}

TEST(Gelu, HasTheSameBitsWithAnyNumberOfThreads) {
  const at::Tensor x = test_values({300, 501}, 2);
  const auto solve = [&](at::ScalarType dtype) {
    const at::Tensor leaf = x.to(dtype).requires_grad_(true);
    const at::Tensor y = birkhoff::gelu(leaf);
    return at::stack({y.detach(), torch::autograd::grad({y}, {leaf}, {leaf.detach()})[0]});
  };
  const int threads = at::get_num_threads();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    at::set_num_threads(1);
    const at::Tensor one = solve(dtype);
    for (const int more : {2, 3}) {
      at::set_num_threads(more);
      EXPECT_TRUE(at::equal(one, solve(dtype))) << more;
    }
  }
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace birkhoff::test
