// Weights that leave padding out, against sums that are divided by the existing share. Legend: B
// batch, H heads, N blocks of b tokens, D head dim.
#include "attention/kernels/sorted_blocks/existing_share.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "attention/kernels/block_mix/block_mix.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr std::int64_t kHeads = 2, kBlocks = 4, kBlock = 5, kHeadDim = 3;

TEST(ExistingShare, WeightsWithoutLastBlocksDivideByIt) {
  const at::Tensor lengths_B = at::tensor({20, 19, 16, 15, 6, 5, 3}, at::kLong);
  const std::int64_t B = lengths_B.size(0), L = kBlocks * kBlock;
  const at::Tensor x_BHLD = random_tensor({B, kHeads, L, kHeadDim}, at::kDouble, 1);
  const Blocks blocks(x_BHLD, {.key_lengths_B = lengths_B, .segments_BL = {}}, kBlock, false);
  const at::Tensor exists_BN = blocks.valid_BNb().select(2, 0);
  const at::Tensor weights_BHNN = random_tensor({B, kHeads, kBlocks, kBlocks}, at::kDouble, 2)
                                      .abs()
                                      .masked_fill(exists_BN.logical_not().view({B, 1, 1, -1}), 0)
                                      .requires_grad_(true);
  const at::Tensor padding = blocks.valid_BNb().logical_not().view({B, 1, kBlocks, kBlock, 1});
  const at::Tensor x_BHNbD = blocks.to_blocks(x_BHLD, 2).masked_fill(padding, 0);

  const ExistingShare share(blocks, weights_BHNN);
  const at::Tensor divided = mix_blocks(weights_BHNN, x_BHNbD) / share.share_BHUb.unsqueeze(4);
  const at::Tensor last_B1 = (at::remainder(lengths_B - 1, kBlock) + 1).unsqueeze(1);
  const at::Tensor with_last = (at::arange(kBlock) < last_B1).view({B, 1, 1, kBlock, 1});
  const at::Tensor last_weights = share.without_last_blocks(blocks, weights_BHNN);
  const at::Tensor left_out =
      at::where(with_last, mix_blocks(weights_BHNN, x_BHNbD), mix_blocks(last_weights, x_BHNbD));
  EXPECT_GT(with_last.logical_not().sum().item<int>(), 0);
  EXPECT_LE((left_out - divided).abs().max().item<double>(), 1e-14);

  const at::Tensor d_y = random_tensor(x_BHNbD.sizes(), at::kDouble, 3);
  const auto gradient = [&](const at::Tensor& y) {
    return torch::autograd::grad({y}, {weights_BHNN}, {d_y}, /*retain_graph=*/true)[0];
  };
  // Weights of blocks of padding are constants.
  const at::Tensor is_constant = exists_BN.logical_not().view({B, 1, 1, -1});
  const at::Tensor expected = gradient(divided).masked_fill(is_constant, 0);
  EXPECT_LE((gradient(left_out).masked_fill(is_constant, 0) - expected).abs().max().item<double>(),
            1e-13);
  // Padding gets no gradient.
  const at::Tensor d_x = at::where(with_last, mix_blocks(weights_BHNN.transpose(2, 3), d_y),
                                   mix_blocks(last_weights.transpose(2, 3), d_y));
  EXPECT_EQ(d_x.masked_fill(padding.logical_not(), 0).abs().max().item<double>(), 0);
  EXPECT_GT(d_x.abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace birkhoff::test
