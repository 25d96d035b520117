// Sliding windows equal dense attention with a mask, for any window, length and blocks of the
// kernels.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

configs::Mechanism window_of(int width) {
  configs::Mechanism config;
  config.mutable_sliding_window()->set_width(width);
  return config;
}

MechanismShape shape_of(std::int64_t num_tokens, bool causal) {
  return {
      .channels = 5, .heads = 2, .head_dim = 3, .sequence_length = num_tokens, .causal = causal};
}

// Every pair of the window, and no other one: softmax over exactly these keys.
TEST(SlidingWindow, IsDenseAttentionWithAMask) {
  for (const bool causal : {false, true}) {
    for (const auto& [width, num_tokens] : {std::pair(1, 9),
                                            {2, 9},
                                            {5, 23},
                                            {63, 200},
                                            {64, 200},
                                            {65, 200},
                                            {100, 130},
                                            {128, 300},
                                            {129, 300},
                                            {600, 700},
                                            {1000, 90},
                                            {1 << 20, 70}}) {
      SCOPED_TRACE(std::to_string(width) + " of " + std::to_string(num_tokens) +
                   (causal ? " causal" : ""));
      const Built built(window_of(width), shape_of(num_tokens, causal), at::kDouble);
      const AttentionInput in = random_input(num_tokens, at::kDouble, 1);
      const at::Tensor distance = at::arange(num_tokens).unsqueeze(1) - at::arange(num_tokens);
      const at::Tensor visible =
          at::logical_and(distance.abs() < width, distance >= (causal ? 0 : -num_tokens));
      EXPECT_TRUE(at::equal(built.mechanism->visible_keys(num_tokens, num_tokens), visible));
      const at::Tensor scores = at::matmul(in.q_BHLD, in.k_BHSD.transpose(2, 3)) / std::sqrt(3.0);
      const at::Tensor expected =
          at::matmul(scores.masked_fill(visible.logical_not(), -INFINITY).softmax(-1), in.v_BHSD);
      const auto all = leaves(in, built.parameters);
      const auto d_expected = gradients(expected, all);
      for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
        const at::Tensor out = run(*built.mechanism, in, path);
        EXPECT_LE(max_difference(out, expected), 1e-13);
        const auto d = gradients(out, all);
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_LE(max_difference(d[i], d_expected[i]), 1e-12) << "leaf " << i;
        }
      }
    }
  }
}

// Padding and documents in windows of several blocks, on all paths.
TEST(SlidingWindow, HidesPaddingAndOtherDocuments) {
  constexpr std::int64_t kTokens = 200;
  for (const bool causal : {false, true}) {
    for (const int width : {3, 64, 100}) {
      SCOPED_TRACE(std::to_string(width) + (causal ? " causal" : ""));
      const Built built(window_of(width), shape_of(kTokens, causal), at::kDouble);
      AttentionInput in = random_input(kTokens, at::kDouble, 1);
      const at::Tensor place = at::arange(kTokens);
      in.key_lengths_B = at::tensor({150, 200}, at::kLong);
      in.segments_q_BL = in.segments_kv_BS =
          at::stack({place >= 70, (place >= 40).to(at::kInt) + (place >= 130)}).to(at::kInt);
      const at::Tensor same = in.segments_q_BL.unsqueeze(2) == in.segments_kv_BS.unsqueeze(1);
      const at::Tensor valid = place < in.key_lengths_B.unsqueeze(1);
      const at::Tensor visible = at::logical_and(at::logical_and(same, valid.unsqueeze(1)),
                                                 built.mechanism->visible_keys(kTokens, kTokens))
                                     .unsqueeze(1);
      const at::Tensor scores = at::matmul(in.q_BHLD, in.k_BHSD.transpose(2, 3)) / std::sqrt(3.0);
      const at::Tensor p = scores.masked_fill(visible.logical_not(), -INFINITY).softmax(-1);
      const at::Tensor expected = at::matmul(p.nan_to_num(0), in.v_BHSD);  // 0 without a key
      for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
        EXPECT_LE(max_difference(run(*built.mechanism, in, path), expected), 1e-13);
      }
    }
  }
}

// Where a window is as long as the sequence, it is dense attention; where each query sees its own
// token only, the output is its value.
TEST(SlidingWindow, TheLongestAndTheShortestWindow) {
  const AttentionInput in = random_input(20, at::kFloat, 1);
  configs::Mechanism dense;
  dense.mutable_dense();
  for (const bool causal : {false, true}) {
    EXPECT_LE(
        max_difference(run(*Built(window_of(20), causal, at::kFloat).mechanism, in, Path::kFused),
                       run(*Built(dense, causal, at::kFloat).mechanism, in, Path::kFused)),
        1e-5);
    EXPECT_TRUE(at::equal(run(*Built(window_of(1), causal, at::kFloat).mechanism, in, Path::kFused),
                          in.v_BHSD));
  }
}

// Block windows whose queries see just what a sliding window of the same reach shows them: those of
// a block's last token.
TEST(SlidingWindow, EqualsBlockWindowsWhereTheyCoincide) {
  const AttentionInput in = random_input(24, at::kDouble, 1);
  configs::Mechanism blocks;
  blocks.mutable_block_local()->set_block(4);
  blocks.mutable_block_local()->set_look_back(1);
  const at::Tensor of_blocks = run(*Built(blocks, true, at::kDouble).mechanism, in, Path::kFused);
  const at::Tensor sliding =
      run(*Built(window_of(8), true, at::kDouble).mechanism, in, Path::kFused);
  for (const std::int64_t last : {7, 11, 15, 19, 23}) {
    EXPECT_LE(max_difference(of_blocks.select(2, last), sliding.select(2, last)), 1e-14);
  }
}

TEST(SlidingWindow, FlopsCountThePairs) {
  for (const bool causal : {false, true}) {
    for (const auto& [width, num_tokens] : {std::pair(1, 10), {4, 10}, {10, 10}, {99, 10}}) {
      const Built built(window_of(width), shape_of(num_tokens, causal), at::kFloat);
      const double pairs =
          built.mechanism->visible_keys(num_tokens, num_tokens).sum().item<double>();
      EXPECT_EQ(built.mechanism->forward_flops(num_tokens), 4 * pairs * 2 * 3);
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
