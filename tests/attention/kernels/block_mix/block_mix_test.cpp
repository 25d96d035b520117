// Block mixing with a triangle of weights, against the whole matrix product in fp64. Legend: B
// batch, H heads, N blocks, b tokens of a block, D head dim.
#include "attention/kernels/block_mix/block_mix.h"

#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>
#include <vector>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_mix/cpu_mix.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

struct Sizes {
  std::int64_t N, b, D;
};
constexpr Sizes kMixSizes[] = {{1, 2, 3},   {2, 1, 16}, {3, 4, 5},  {8, 2, 64},
                               {17, 1, 33}, {70, 1, 8}, {33, 2, 16}};

// [B, H, N, b, D] with B = H = 2: contiguous, or laid out as the layers do.
at::Tensor blocks(const Sizes& s, bool contiguous, std::uint64_t seed) {
  if (contiguous) return random_tensor({2, 2, s.N, s.b, s.D}, at::kDouble, seed);
  return random_tensor({2, s.N, s.b, 2, s.D}, at::kDouble, seed).permute({0, 3, 1, 2, 4});
}

// The error that sums of up to N b D products of unit numbers may have.
double tolerance(at::ScalarType dtype, const Sizes& s) {
  const double unit = dtype == at::kDouble  ? 0x1p-52
                      : dtype == at::kFloat ? 0x1p-23
                      : dtype == at::kHalf  ? 0x1p-10
                                            : 0x1p-7;
  return 4 * unit * (8 + std::sqrt(static_cast<double>(s.N * s.b * s.D)));
}

// `others`: x has other uses too.
void check(const Sizes& s, std::int64_t diagonal, bool contiguous, bool others,
           at::ScalarType dtype) {
  const std::string what =
      fmt::format("N {} b {} D {} diagonal {} contiguous {} others {} {}", s.N, s.b, s.D, diagonal,
                  contiguous, others, c10::toString(dtype));
  const auto leaf = [&](const at::Tensor& x) { return x.to(dtype).detach().requires_grad_(true); };
  const auto exact = [](const at::Tensor& x) {
    return x.detach().to(at::kDouble).requires_grad_(true);
  };
  const at::Tensor w = leaf(random_tensor({2, 2, s.N, s.N}, at::kDouble, 1).tril(diagonal));
  const at::Tensor k = leaf(blocks(s, contiguous, 2)), v = leaf(blocks(s, contiguous, 3));
  const at::Tensor exact_w = exact(w), exact_k = exact(k), exact_v = exact(v);
  const auto [y, x] = mix_lower_blocks(w, {k, v}, diagonal, Path::kFused);
  ASSERT_EQ(y.size(), 2u);
  ASSERT_EQ(x.size(), 2u);
  EXPECT_EQ(y[0].scalar_type(), dtype) << what;
  std::vector<at::Tensor> results = y, expected_results;
  for (const at::Tensor& each : {exact_k, exact_v}) {
    expected_results.push_back(mix_blocks(exact_w.tril(diagonal), each));
  }
  if (others) {
    results.insert(results.end(), x.begin(), x.end());
    expected_results.insert(expected_results.end(), {exact_k, exact_v});
  }
  const at::Tensor out = at::cat(results, -1), expected = at::cat(expected_results, -1);
  EXPECT_LE(max_difference(out, expected), tolerance(dtype, s)) << what;
  const auto d = gradients(out, {w, k, v});
  const auto d_expected = gradients(expected, {exact_w, exact_k, exact_v});
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_LE(max_difference(d[i], d_expected[i]), 2 * tolerance(dtype, s))
        << what << " leaf " << i;
  }
}

TEST(MixLowerBlocks, EqualsTheWholeProductAndSoDoGradients) {
  for (const Sizes& s : kMixSizes) {
    for (const std::int64_t diagonal : {std::int64_t{-1}, std::int64_t{0}, s.N - 1}) {
      for (const bool contiguous : {true, false}) {
        for (const bool others : {false, true}) {
          // fp16 has no kernel on the CPU.
          for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
            check(s, diagonal, contiguous, others, dtype);
          }
        }
      }
    }
  }
}

// Any of the results may be unused, and gradients may be views.
TEST(MixLowerBlocks, UnusedResultsHaveNoGradients) {
  for (const at::ScalarType dtype : {at::kDouble, at::kHalf}) {
    const auto leaf = [&](const at::Tensor& x) {
      return x.to(dtype).detach().requires_grad_(true);
    };
    const at::Tensor w = leaf(random_tensor({2, 2, 5, 5}, at::kDouble, 1).tril(-1)),
                     k = leaf(blocks({5, 2, 3}, false, 2)), v = leaf(blocks({5, 2, 3}, true, 3));
    const auto mix = [&](const at::Tensor& x) { return mix_blocks(w.tril(-1), x).sum(); };
    const auto [y, x] = mix_lower_blocks(w, {k, v}, -1, Path::kFused);
    const std::pair<at::Tensor, at::Tensor> cases[] = {
        {y[0].sum(), mix(k)},
        {y[1].sum() + x[0].sum(), mix(v) + k.sum()},
        {x[1].sum(), v.sum()},
    };
    for (const auto& [sum, expected] : cases) {
      const auto d = torch::autograd::grad({sum}, {w, k, v}, {}, true, false, true);
      const auto d_expected = torch::autograd::grad({expected}, {w, k, v}, {}, true, false, true);
      for (std::size_t i = 0; i < 3; ++i) {
        const at::Tensor zeros = at::zeros_like(i == 0 ? w : i == 1 ? k : v);
        EXPECT_LE(max_difference(d[i].defined() ? d[i] : zeros,
                                 d_expected[i].defined() ? d_expected[i] : zeros),
                  dtype == at::kDouble ? 1e-13 : 0.02)
            << "leaf " << i;
      }
    }
  }
}

// All heads share the weights of one: their gradient is the sum over heads.
TEST(MixLowerBlocks, WeightsMayBeShared) {
  const at::Tensor w =
      random_tensor({1, 1, 5, 5}, at::kDouble, 1).tril(-1).detach().requires_grad_(true);
  const at::Tensor x = blocks({5, 2, 3}, false, 2);
  const at::Tensor out = mix_lower_blocks(w, {x}, -1, Path::kFused).y_BHNbD[0],
                   expected = mix_blocks(w.tril(-1), x);
  EXPECT_LE(max_difference(out, expected), 1e-14);
  EXPECT_LE(max_difference(gradients(out, {w})[0], gradients(expected, {w})[0]), 1e-13);
}

// Later blocks are not read, not even where they are NaN.
TEST(MixLowerBlocks, LaterPanelsAreNotRead) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor w = random_tensor({2, 2, 70, 70}, at::kDouble, 1).tril(-1).to(dtype);
    const at::Tensor x = blocks({70, 1, 8}, false, 2).to(dtype);
    at::Tensor broken = x.clone();
    broken.narrow(2, 40, 30).fill_(std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(
        at::equal(mix_lower_blocks(w, {x}, -1, Path::kFused).y_BHNbD[0].narrow(2, 0, 18),
                  mix_lower_blocks(w, {broken}, -1, Path::kFused).y_BHNbD[0].narrow(2, 0, 18)));
  }
}

template <typename T>
void check_set(InstructionSet set, const Sizes& s, int diagonal) {
  const at::ScalarType dtype = std::is_same_v<T, float>    ? at::kFloat
                               : std::is_same_v<T, double> ? at::kDouble
                                                           : at::kBFloat16;
  const MixKernels<T>& kernels = mix_kernels<T>(set);
  const MixShape shape{static_cast<int>(s.N), static_cast<int>(s.b), static_cast<int>(s.D),
                       diagonal};
  // Above the diagonal nothing is read.
  const at::Tensor w = random_tensor({s.N, s.N}, at::kDouble, 1)
                           .to(dtype)
                           .tril(diagonal)
                           .masked_fill(at::ones({s.N, s.N}, at::kBool).triu(diagonal + 1),
                                        std::numeric_limits<double>::quiet_NaN())
                           .t()
                           .contiguous()
                           .t();
  const at::Tensor x = random_tensor({s.N, s.b, s.D + 3}, at::kDouble, 2).to(dtype),
                   d_y = random_tensor({s.N, s.b, s.D}, at::kDouble, 3).to(dtype),
                   other = random_tensor({s.N, s.b, s.D + 1}, at::kDouble, 4).to(dtype);
  at::Tensor y = at::zeros_like(d_y), d_x = at::zeros_like(d_y),
             d_x_and_other = at::zeros_like(d_y), d_w = at::ones_like(w);
  d_w = d_w.contiguous();
  std::vector<std::byte> memory(kernels.scratch_bytes(shape) + 64);
  void* scratch = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  const auto head = [](const at::Tensor& from) {
    return HeadBlocks<T>{static_cast<T*>(from.mutable_data_ptr()), from.stride(0), from.stride(1)};
  };
  const auto const_head = [&](const at::Tensor& from) {
    const HeadBlocks<T> blocks = head(from);
    return HeadBlocks<const T>{blocks.data, blocks.block_stride, blocks.token_stride};
  };
  const MixWeights<T> weights{static_cast<const T*>(w.const_data_ptr()), w.stride(0), w.stride(1)};
  // The same tensor twice: twice the gradient of the weights.
  const HeadBlocks<const T> xs[] = {const_head(x), const_head(x)},
                            d_ys[] = {const_head(d_y), const_head(d_y)};
  const HeadBlocks<T> ys[] = {head(y), head(y)}, d_xs[] = {head(d_x), head(d_x_and_other)};
  const HeadBlocks<const T> others[] = {{}, const_head(other)};
  kernels.forward(shape, weights, xs, ys, 2, scratch);
  kernels.backward(shape, weights, xs, d_ys, others, d_xs, 2,
                   static_cast<T*>(d_w.mutable_data_ptr()), scratch);
  const at::Tensor wide_w = w.to(at::kDouble).nan_to_num().tril(diagonal),
                   wide_x = x.to(at::kDouble).narrow(2, 0, s.D), wide_d_y = d_y.to(at::kDouble);
  const auto mixed = [](const at::Tensor& by, const at::Tensor& what) {
    return at::matmul(by, what.flatten(1)).view(what.sizes());
  };
  const std::string what =
      fmt::format("set {} {} N {} b {} D {} diagonal {}", static_cast<int>(set),
                  c10::toString(dtype), s.N, s.b, s.D, diagonal);
  EXPECT_LE(max_difference(y, mixed(wide_w, wide_x)), tolerance(dtype, s)) << what;
  const at::Tensor exact_d_x = mixed(wide_w.t(), wide_d_y);
  EXPECT_LE(max_difference(d_x, exact_d_x), tolerance(dtype, s)) << what;
  EXPECT_LE(max_difference(d_x_and_other, exact_d_x + other.to(at::kDouble).narrow(2, 0, s.D)),
            tolerance(dtype, s))
      << what;
  EXPECT_LE(max_difference(
                d_w, at::matmul(wide_d_y.flatten(1), wide_x.flatten(1).t()).mul_(2).tril(diagonal)),
            2 * tolerance(dtype, s))
      << what;
}

TEST(MixKernels, EachInstructionSetIsExact) {
  for (const InstructionSet set :
       {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512,
        InstructionSet::kAvx512Bf16, InstructionSet::kAmxBf16}) {
    if (!is_supported(set)) continue;
    for (const Sizes& s : kMixSizes) {
      for (const int diagonal : {-1, 0, static_cast<int>(s.N) - 1}) {
        check_set<float>(set, s, diagonal);
        check_set<double>(set, s, diagonal);
        check_set<Bf16>(set, s, diagonal);
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
