// Random problems for the GPU block-mixing kernels, and bounds of their errors against fp64.
// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff::test {

struct MixSizes {
  std::int64_t batch = 1, heads = 1, blocks = 1, block = 2, head_dim = 64;
};

// Numbers are representable in `dtype`, except the weights, which are fp32 with zeros above the
// diagonal.
struct MixProblem {
  at::Tensor weights_BHNN;
  // MixPadding, may be undefined. x is NaN at padding. Both weights are 0 for blocks of padding.
  at::Tensor lengths_B, last_weights_BHNN;
  std::vector<at::Tensor> x_BHNbD, d_y_BHNbD;
  std::vector<at::Tensor> others_BHNbD;  // added to d_x; may be undefined
  std::int64_t diagonal;
  std::string name;

  MixProblem to(at::Device device) const;
};

// `layers`: x and d_y have the layout of the layers inside wider tensors, where keys and values
// come from one product; otherwise they are contiguous. `tensors`: how many are mixed. Two of three
// tensors have other uses.
MixProblem make_mix_problem(const MixSizes& sizes, std::int64_t diagonal, at::ScalarType dtype,
                            bool layers, int tensors, std::uint64_t seed);

// The same with padding: samples end in the last block or before, at a block's end or inside one.
// The weights are all of a diagonal of N - 1.
MixProblem make_padded_mix_problem(const MixSizes& sizes, const std::vector<std::int64_t>& lengths,
                                   at::ScalarType dtype, bool layers, int tensors,
                                   std::uint64_t seed);

// `results`: d_w (with padding of both weights, [2, B, H, N, N]), then y and d_x of each tensor.
// Each number may be wrong by one rounding to its dtype plus the error of fp32 sums.
void expect_mixes(const std::vector<at::Tensor>& results, const MixProblem& problem);

}  // namespace birkhoff::test
