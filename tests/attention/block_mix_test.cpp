// Block mixes with a triangle of weights, against the whole matrix product in fp64.
// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#include "attention/block_mix.h"

#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "attention/block_mix_tile.h"
#include "attention/blocks.h"
#include "tests/attention/mechanism_cases.h"

namespace birkhoff::testing {
namespace {

struct Sizes {
  std::int64_t N, b, D;
};
constexpr Sizes kSizes[] = {{1, 2, 3},   {2, 1, 16}, {3, 4, 5},  {8, 2, 64},
                            {17, 1, 33}, {70, 1, 8}, {33, 2, 16}};

// [B, H, N, b, D] with B = H = 2: contiguous, or as the layers make it.
at::Tensor blocks(const Sizes& s, bool contiguous, std::uint64_t seed) {
  if (contiguous) return random_tensor({2, 2, s.N, s.b, s.D}, at::kDouble, seed);
  return random_tensor({2, s.N, s.b, 2, s.D}, at::kDouble, seed).permute({0, 3, 1, 2, 4});
}

// The error that sums of up to N b D products of unit numbers may have.
double tolerance(at::ScalarType dtype, const Sizes& s) {
  const double unit = dtype == at::kDouble ? 0x1p-52 : dtype == at::kFloat ? 0x1p-23 : 0x1p-7;
  return 4 * unit * (8 + std::sqrt(static_cast<double>(s.N * s.b * s.D)));
}

void check(const Sizes& s, std::int64_t diagonal, bool contiguous, at::ScalarType dtype) {
  const std::string what = fmt::format("N {} b {} D {} diagonal {} contiguous {} {}", s.N, s.b, s.D,
                                       diagonal, contiguous, c10::toString(dtype));
  const auto leaf = [&](const at::Tensor& x) { return x.to(dtype).detach().requires_grad_(true); };
  const auto exact = [](const at::Tensor& x) {
    return x.detach().to(at::kDouble).requires_grad_(true);
  };
  const at::Tensor w = leaf(random_tensor({2, 2, s.N, s.N}, at::kDouble, 1).tril(diagonal));
  const at::Tensor k = leaf(blocks(s, contiguous, 2)), v = leaf(blocks(s, contiguous, 3));
  const at::Tensor exact_w = exact(w), exact_k = exact(k), exact_v = exact(v);
  const std::vector<at::Tensor> mixes = mix_lower_blocks(w, {k, v}, diagonal);
  ASSERT_EQ(mixes.size(), 2u);
  EXPECT_EQ(mixes[0].scalar_type(), dtype) << what;
  const at::Tensor out = at::cat({mixes[0], mixes[1]}, -1);
  const at::Tensor expected = at::cat(
      {mix_blocks(exact_w.tril(diagonal), exact_k), mix_blocks(exact_w.tril(diagonal), exact_v)},
      -1);
  EXPECT_LE(max_difference(out, expected), tolerance(dtype, s)) << what;
  const auto d = gradients(out, {w, k, v});
  const auto d_expected = gradients(expected, {exact_w, exact_k, exact_v});
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_LE(max_difference(d[i], d_expected[i]), 2 * tolerance(dtype, s))
        << what << " leaf " << i;
  }
}

TEST(MixLowerBlocks, EqualsTheWholeProductAndSoDoGradients) {
  for (const Sizes& s : kSizes) {
    for (const std::int64_t diagonal : {std::int64_t{-1}, std::int64_t{0}, s.N - 1}) {
      for (const bool contiguous : {true, false}) {
        // bf16 has no kernel: GEMMs of panels.
        for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
          check(s, diagonal, contiguous, dtype);
        }
      }
    }
  }
}

// One head's weights for all: their gradient is the sum over heads.
TEST(MixLowerBlocks, WeightsMayBeShared) {
  const at::Tensor w =
      random_tensor({1, 1, 5, 5}, at::kDouble, 1).tril(-1).detach().requires_grad_(true);
  const at::Tensor x = blocks({5, 2, 3}, false, 2);
  const at::Tensor out = mix_lower_blocks(w, {x}, -1)[0], expected = mix_blocks(w.tril(-1), x);
  EXPECT_LE(max_difference(out, expected), 1e-14);
  EXPECT_LE(max_difference(gradients(out, {w})[0], gradients(expected, {w})[0]), 1e-13);
}

// Later blocks are not read: not even where they are no numbers.
TEST(MixLowerBlocks, LaterPanelsAreNotRead) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor w = random_tensor({2, 2, 70, 70}, at::kDouble, 1).tril(-1).to(dtype);
    const at::Tensor x = blocks({70, 1, 8}, false, 2).to(dtype);
    at::Tensor broken = x.clone();
    broken.narrow(2, 40, 30).fill_(std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(at::equal(mix_lower_blocks(w, {x}, -1)[0].narrow(2, 0, 18),
                          mix_lower_blocks(w, {broken}, -1)[0].narrow(2, 0, 18)));
  }
}

template <typename T>
void check_set(InstructionSet set, const Sizes& s, int diagonal) {
  const at::ScalarType dtype = std::is_same_v<T, float> ? at::kFloat : at::kDouble;
  const MixKernels<T>& kernels = mix_kernels<T>(set);
  const MixShape shape{static_cast<int>(s.N), static_cast<int>(s.D), diagonal};
  const std::int64_t padded = kernels.padded_blocks(shape.num_blocks);
  const at::Tensor w = random_tensor({s.N, s.N}, at::kDouble, 1).tril(diagonal).to(dtype);
  const at::Tensor x = random_tensor({s.N, s.D + 3}, dtype, 2),
                   d_y = random_tensor({s.N, s.D}, dtype, 3);
  at::Tensor w_padded = at::zeros({padded, padded}, w.options());
  w_padded.narrow(0, 0, s.N).narrow(1, 0, s.N).copy_(w);
  const at::Tensor w_t = w_padded.t().contiguous();
  at::Tensor y = at::zeros_like(d_y), d_x = at::zeros_like(d_y), d_w = at::ones_like(w_padded);
  std::vector<std::byte> memory(kernels.scratch_bytes(shape) + 64);
  void* scratch = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  kernels.forward(shape, w_padded.data_ptr<T>(), {x.data_ptr<T>(), s.D + 3}, {y.data_ptr<T>(), s.D},
                  scratch);
  kernels.backward(shape, w_t.data_ptr<T>(), {x.data_ptr<T>(), s.D + 3}, {d_y.data_ptr<T>(), s.D},
                   {d_x.data_ptr<T>(), s.D}, d_w.data_ptr<T>(), scratch);
  const at::Tensor wide_w = w.to(at::kDouble), wide_x = x.to(at::kDouble).narrow(1, 0, s.D),
                   wide_d_y = d_y.to(at::kDouble);
  const std::string what =
      fmt::format("set {} N {} D {} diagonal {}", static_cast<int>(set), s.N, s.D, diagonal);
  EXPECT_LE(max_difference(y, at::matmul(wide_w, wide_x)), tolerance(dtype, s)) << what;
  EXPECT_LE(max_difference(d_x, at::matmul(wide_w.t(), wide_d_y)), tolerance(dtype, s)) << what;
  EXPECT_LE(max_difference(d_w.narrow(0, 0, s.N).narrow(1, 0, s.N).tril(diagonal),
                           (at::matmul(wide_d_y, wide_x.t()) + 1).tril(diagonal)),
            tolerance(dtype, s))
      << what;
}

TEST(MixKernels, EachInstructionSetIsExact) {
  for (const InstructionSet set :
       {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (!is_supported(set)) continue;
    for (const Sizes& s : kSizes) {
      for (const int diagonal : {-1, 0, static_cast<int>(s.N) - 1}) {
        check_set<float>(set, s, diagonal);
        check_set<double>(set, s, diagonal);
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::testing
