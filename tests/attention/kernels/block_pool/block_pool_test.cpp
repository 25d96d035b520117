// Block pooling in one pass, against LibTorch operations, and its GPU kernels against it. Legend: B
// batch, L tokens, N blocks, b tokens of a block, C channels.
#include "attention/kernels/block_pool/block_pool.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <array>

#include "attention/mechanisms/sinkhorn/sort_net.h"
#include "configs/schema/attention.pb.h"
#include "tests/attention/kernels/block_pool/block_pool_emulated.h"
#include "tests/attention/kernels/block_pool/block_pool_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using configs::SinkhornAttention;

// The input that determines the blocks. masks & 1: padding, masks & 2: documents.
AttentionInput input_of(std::int64_t L, int masks) {
  AttentionInput in;
  in.q_BHLD = in.k_BHSD = at::zeros({2, 1, L, 1});
  if (masks & 1) in.key_lengths_B = at::tensor({L - L / 3, L / 2}, at::kLong);
  if (masks & 2) {
    const at::Tensor place_L = at::arange(L);
    in.segments_q_BL = in.segments_kv_BS =
        at::stack({(place_L + 3).div(7, "floor"), (place_L > L / 2).to(at::kLong)}).to(at::kInt);
  }
  return in;
}

std::vector<at::Tensor> features(const AttentionInput& in, std::int64_t block, bool causal,
                                 const at::Tensor& x_BLC, Path path) {
  const Blocks blocks = token_blocks(in, block, causal);
  std::vector<at::Tensor> result{pool_sources(blocks, x_BLC, path)};
  SinkhornAttention config;
  for (const auto pooling :
       {SinkhornAttention::sum, SinkhornAttention::mean, SinkhornAttention::cumulative_mean}) {
    config.set_pooling(pooling);
    result.push_back(pool_destinations(config, causal, blocks, x_BLC, {}, path));
  }
  return result;
}

constexpr std::array<std::int64_t, 3> kPoolSizes[] = {{1, 1, 1},    {7, 3, 5},   {16, 4, 8},
                                                      {33, 8, 130}, {40, 64, 3}, {120, 10, 2}};

template <typename Check>
void for_each_case(const Check& check) {
  for (const auto& [L, b, C] : kPoolSizes) {
    for (int masks = 0; masks < 4; ++masks) {
      for (const bool causal : {false, true}) {
        check(input_of(L, masks), L, b, C, causal,
              fmt::format("L {} b {} C {} masks {} causal {}", L, b, C, masks, causal));
      }
    }
  }
}

// Gradients of x from its first tokens. With `other` also from x + other: the gradients of these
// terms share memory.
std::vector<at::Tensor> gradients_of_first(const at::Tensor& x_BLC, const at::Tensor& other_BLC,
                                           std::int64_t block, bool fused) {
  const at::Tensor x = x_BLC.detach().requires_grad_(true);
  const FirstTokens taken =
      fused ? first_of_blocks(x, block) : FirstTokens{x, x.slice(1, 0, x.size(1), block)};
  EXPECT_TRUE(at::equal(taken.x_BLC, x));
  EXPECT_TRUE(at::equal(taken.first_BNC, x.slice(1, 0, x.size(1), block)));
  at::Tensor loss =
      (taken.first_BNC * random_tensor(taken.first_BNC.sizes(), at::kDouble, 5)).sum();
  if (!other_BLC.defined()) return gradients(loss, {x});
  const at::Tensor other = other_BLC.detach().requires_grad_(true);
  return gradients(loss + ((taken.x_BLC + other) * random_tensor(x.sizes(), at::kDouble, 6)).sum(),
                   {x, other});
}

TEST(BlockPool, GradientsOfFirstTokensAreAddedToOthers) {
  for (const auto& [L, b, C] : kPoolSizes) {
    const at::Tensor x_BLC = random_tensor({2, L, C}, at::kDouble, 1);
    for (const at::Tensor& other_BLC : {at::Tensor(), random_tensor({2, L, C}, at::kDouble, 2)}) {
      const auto taken = gradients_of_first(x_BLC, other_BLC, b, true),
                 expected = gradients_of_first(x_BLC, other_BLC, b, false);
      for (std::size_t i = 0; i < taken.size(); ++i) {
        EXPECT_TRUE(at::equal(taken[i], expected[i])) << "L " << L << " gradient " << i;
      }
    }
  }
}

TEST(BlockPool, GradientsOfFirstTokensAreAddedInPlace) {
  const at::Tensor leaf_BLC = random_tensor({2, 16, 3}, at::kFloat, 1).requires_grad_(true),
                   x_BLC = leaf_BLC * 2;
  const FirstTokens taken = first_of_blocks(x_BLC, 4);
  std::vector<const void*> at;
  const auto record = [&](const at::Tensor& d_x) { at.push_back(d_x.const_data_ptr()); };
  x_BLC.register_hook(record);
  taken.x_BLC.register_hook(record);
  const at::Tensor y_BLC = at::matmul(taken.x_BLC, random_tensor({3, 5}, at::kFloat, 2));
  gradients(y_BLC.square().sum() + taken.first_BNC.square().sum(), {leaf_BLC});
  ASSERT_EQ(at.size(), 2u);
  EXPECT_EQ(at[0], at[1]);
}

TEST(BlockPool, EqualsLibTorchsOperationsAndSoDoGradients) {
  for_each_case([](const AttentionInput& in, std::int64_t L, std::int64_t b, std::int64_t C,
                   bool causal, const std::string& what) {
    // A whole tensor, channels of a wider tensor, and channels that are not adjacent in memory.
    for (const at::Tensor& x_BLC : {random_tensor({2, L, C}, at::kDouble, 1),
                                    random_tensor({2, L, C + 3}, at::kDouble, 2).narrow(2, 1, C),
                                    random_tensor({2, C, L}, at::kDouble, 3).transpose(1, 2)}) {
      const at::Tensor leaf = x_BLC.detach().requires_grad_(true);
      const auto fused = features(in, b, causal, leaf, Path::kFused),
                 expected = features(in, b, causal, leaf, Path::kReference);
      for (std::size_t i = 0; i < fused.size(); ++i) {
        EXPECT_EQ(fused[i].scalar_type(), at::kDouble);
        EXPECT_LE(max_difference(fused[i], expected[i]), 1e-13) << what << " feature " << i;
        EXPECT_LE(max_difference(gradients(fused[i], {leaf})[0], gradients(expected[i], {leaf})[0]),
                  1e-13)
            << what << " feature " << i;
      }
    }
  });
}

// Features are linear: for all x and d, f(x) . d = x . f'(d).
TEST(BlockPool, GradientIsTheTranspose) {
  for (PoolProblem problem : pool_problems()) {
    BlockPooling& pooling = problem.pooling;
    if (pooling.divisor_BN1.defined()) pooling.divisor_BN1 = pooling.divisor_BN1.to(at::kDouble);
    problem.d_psi_BNC = problem.d_psi_BNC.to(at::kDouble);
    const at::Tensor x_BLC = problem.x_BLC.to(at::kDouble);
    const auto results = solve(problem, x_BLC);
    const double forward = (results[0] * problem.d_psi_BNC).sum().item<double>(),
                 backward = (x_BLC * results[1]).sum().item<double>();
    EXPECT_NEAR(forward, backward, 1e-10);
  }
}

// In fp32 each sum may lose one rounding per term.
TEST(BlockPool, SumsAreFp32) {
  for_each_case([](const AttentionInput& in, std::int64_t L, std::int64_t b, std::int64_t C,
                   bool causal, const std::string& what) {
    const at::Tensor x_BLC = random_tensor({2, L, C}, at::kFloat, 4);
    const auto fused = features(in, b, causal, x_BLC, Path::kFused),
               exact = features(in, b, causal, x_BLC.to(at::kDouble), Path::kReference),
               sizes = features(in, b, causal, x_BLC.to(at::kDouble).abs(), Path::kReference);
    for (std::size_t i = 0; i < fused.size(); ++i) {
      EXPECT_EQ(fused[i].scalar_type(), at::kFloat);
      const at::Tensor bound = sizes[i] * (static_cast<double>(b + L / b + 2) * 0x1p-24);
      EXPECT_TRUE(((fused[i] - exact[i]).abs() <= bound).all().item<bool>())
          << what << " feature " << i;
    }
  });
}

// bf16 is widened exactly, and its gradient is rounded once.
TEST(BlockPool, NarrowTypesHaveTheBitsOfFp32) {
  for (const PoolProblem& problem : pool_problems()) {
    const at::Tensor narrow_BLC = problem.x_BLC.to(at::kBFloat16);
    const auto results = solve(problem, narrow_BLC),
               expected = solve(problem, narrow_BLC.to(at::kFloat));
    EXPECT_TRUE(at::equal(results[0], expected[0]));
    EXPECT_TRUE(at::equal(results[1], expected[1].to(at::kBFloat16)));
  }
}

TEST(BlockPool, ALaterTokenChangesNoBit) {
  const std::int64_t L = 70, b = 8, C = 140;
  for (int masks = 0; masks < 4; ++masks) {
    const AttentionInput in = input_of(L, masks);
    const at::Tensor x_BLC = random_tensor({2, L, C}, at::kFloat, 5);
    const auto whole = features(in, b, /*causal=*/true, x_BLC, Path::kFused);
    for (std::int64_t token = 1; token < L; token += 5) {
      at::Tensor changed_BLC = x_BLC.clone();
      changed_BLC.narrow(1, token, L - token).mul_(1e3).add_(1);
      const auto parts = features(in, b, /*causal=*/true, changed_BLC, Path::kFused);
      const std::int64_t blocks = (token - 1) / b + 1;  // blocks whose first token is unchanged
      for (std::size_t i = 1; i < whole.size(); ++i) {
        EXPECT_TRUE(at::equal(whole[i].narrow(1, 0, blocks), parts[i].narrow(1, 0, blocks)))
            << "masks " << masks << " token " << token << " feature " << i;
      }
    }
  }
}

TEST(BlockPool, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  PoolProblem problem;
  problem.x_BLC = random_tensor({3, 900, 300}, at::kFloat, 6);
  problem.pooling.block = 16;
  problem.d_psi_BNC = random_tensor({3, 57, 300}, at::kFloat, 7);
  for (const bool cumulative : {false, true}) {
    problem.pooling.cumulative = cumulative;
    at::set_num_threads(1);
    const auto alone = solve(problem, problem.x_BLC);
    for (const int count : {2, 5}) {
      at::set_num_threads(count);
      const auto together = solve(problem, problem.x_BLC);
      EXPECT_TRUE(at::equal(alone[0], together[0]) && at::equal(alone[1], together[1])) << count;
    }
  }
  at::set_num_threads(threads);
}

// The source code of the GPU kernels, run on the CPU, gives the bits of the CPU loops.
TEST(BlockPool, KernelsHaveTheBitsOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const PoolProblem& problem : pool_problems()) {
      const BlockPooling& pooling = problem.pooling;
      const at::Tensor x_BLC = problem.x_BLC.to(dtype);
      const std::int64_t B = 2, L = x_BLC.size(1), N = problem.d_psi_BNC.size(1), C = x_BLC.size(2);
      const auto whole = [](const at::Tensor& x, at::IntArrayRef sizes) {
        return x.defined() ? x.expand(sizes).contiguous() : x;
      };
      const at::Tensor mask = whole(pooling.mask_BNb, {B, N, pooling.block});
      const at::Tensor psi_BNC = at::full_like(problem.d_psi_BNC, NAN),
                       later_BNC = at::full_like(psi_BNC, NAN), d_x_BLC = at::full_like(x_BLC, NAN);
      BlockPoolParams params{};
      params.dtype = dtype == at::kFloat  ? KernelDtype::kFloat
                     : dtype == at::kHalf ? KernelDtype::kHalf
                                          : KernelDtype::kBFloat16;
      params.vectors = C * static_cast<std::int64_t>(x_BLC.itemsize()) % 16 == 0;
      params.cumulative = pooling.cumulative;
      params.batch = B;
      params.tokens = L;
      params.channels = C;
      params.blocks = N;
      params.block = pooling.block;
      if (mask.defined()) params.mask = mask.const_data_ptr<bool>();
      if (pooling.divisor_BN1.defined()) {
        params.divisor = pooling.divisor_BN1.const_data_ptr<float>();
      }
      if (pooling.links_BN.defined())
        params.links = pooling.links_BN.const_data_ptr<std::uint8_t>();
      params.x = x_BLC.const_data_ptr();
      params.x_strides[0] = x_BLC.stride(0);
      params.x_strides[1] = x_BLC.stride(1);
      params.psi = psi_BNC.mutable_data_ptr<float>();
      emulate_block_pool(params);
      params.d_psi = problem.d_psi_BNC.const_data_ptr<float>();
      params.later = later_BNC.mutable_data_ptr<float>();
      params.d_x = d_x_BLC.mutable_data_ptr();
      emulate_block_pool_backward(params);
      const auto expected = solve(problem, x_BLC.to(at::kFloat));
      EXPECT_TRUE(at::equal(psi_BNC, expected[0])) << c10::toString(dtype) << " C " << C;
      EXPECT_TRUE(at::equal(d_x_BLC, expected[1].to(dtype))) << c10::toString(dtype) << " C " << C;
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
