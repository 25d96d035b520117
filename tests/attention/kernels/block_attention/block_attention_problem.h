// Random problems for the GPU block-attention kernels, and the reference's results for them.
// Legend: B batch, H heads (of keys), G query heads of each, N blocks, b tokens of a block, D head
// dim.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff::test {

struct BlockShape {
  std::int64_t batch = 1, heads = 1, blocks = 1, block = 16, head_dim = 64, group = 1;
};

// The options of a problem's keys.
struct KeyChoice {
  int first_offset = 0, last_offset = 0;
  bool causal = false;
  // kQueries: many see no key. kNear: a sliding window of one and a half blocks.
  enum Mask { kNone, kPairs, kQueries, kBlocks, kKeys, kNear } mask = kNone;
  bool bias = false;
};

struct BlockProblem {
  BlockAttention attention;  // its tensors are leaves that require gradients
  std::vector<at::Tensor> leaves;
  at::Tensor d_out;
  std::string name;

  // The same numbers in another type or on another device. Masks and noise move along.
  BlockProblem to(at::ScalarType dtype, at::Device device = at::kCPU) const;
};

// `size` scales queries and keys: logits are about its square. Numbers are representable in
// `dtype`.
BlockProblem make_block_problem(const BlockShape& shape, const std::vector<KeyChoice>& keys,
                                at::ScalarType dtype, double size, float dropout,
                                std::uint64_t seed);
// The same with a table of relative positions of keys, and of values, of all heads or of each. They
// apply to the keys of the last entry; of each entry if it has its own softmax.
BlockProblem with_relative(BlockProblem problem, std::int64_t rows, std::int64_t least,
                           bool per_head, std::uint64_t seed, bool values = false);
// A problem with relative positions and with a bias of each distance.
BlockProblem with_distance_bias(BlockProblem problem, std::uint64_t seed);
// The same with a sink of each query head. Of the size of the largest logits: a sink far below them
// has the gradient of a single query.
BlockProblem with_sink(BlockProblem problem, std::uint64_t seed);
// Draws all of these options by `seed`: blocks of at most `most_tokens`, D of at most
// `most_head_dim`.
BlockProblem random_block_problem(int seed, at::ScalarType dtype, std::int64_t most_tokens,
                                  std::int64_t most_head_dim);

// Returns out, then the gradient of each leaf.
std::vector<at::Tensor> solve(const BlockProblem& problem, Path path);

// Checks that the errors of `kernel` (out and gradients) against fp64 are at most twice those of
// the reference in the same type, plus two roundings of the largest number.
void expect_errors_of_reference(const std::vector<at::Tensor>& kernel, const BlockProblem& problem);

}  // namespace birkhoff::test
