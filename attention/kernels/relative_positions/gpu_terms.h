// The part of relative positions that LibTorch's products compute, before and after the GPU kernels
// of block attention and of attention over gathered rows. So the kernels' memory grows neither with
// the number of pairs nor with rows of tables that no pair uses. Legend: B batch, H heads, L
// queries, P places of their results (L, or slots), R rows of the tables in reach, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/relative_positions/gpu_params.h"
#include "attention/kernels/relative_positions/relative_positions.h"

namespace birkhoff {

// What kernels read and write (DistanceParams), in fp32 and contiguous, with the rows of the tables
// in reach. Undefined without relative positions.
struct DistanceTerms {
  at::Tensor scores_BHLR, of_values_BHLR, p_BHPR, d_s_BHPR;
  at::Tensor keys_HRD, values_HRD, bias_HR;
  std::int64_t first = 0;  // the tables' row that is the first here
  std::int64_t least = 0;  // its distance

  bool defined() const { return scores_BHLR.defined(); }
  DistanceParams params() const;
};

// The terms of queries whose distances to keys are in [lowest, highest], before the forward pass.
DistanceTerms forward_terms(const RelativePositions& relative, std::int64_t lowest,
                            std::int64_t highest, const at::Tensor& q_BHLD, std::int64_t places);
// After it: out += p b.
void add_values(const DistanceTerms& terms, const at::Tensor& out_BHPD);

// Before the backward pass.
DistanceTerms backward_terms(const RelativePositions& relative, std::int64_t lowest,
                             std::int64_t highest, const at::Tensor& q_BHLD,
                             const at::Tensor& d_out_BHLD, std::int64_t places);
struct TableGradients {
  at::Tensor d_keys_HRD, d_values_HRD, d_bias_HR;  // undefined without the table
};
// After it, with the results of places added up to those of queries, d_s and p [B, H, L, R]:
//   d_q_id += scale sum_r d_s_ir a_rd,  d_a_rd = scale sum_i d_s_ir q_id,
//   d_b_rd = sum_i p_ir d_out_id,  d_bias_r = scale sum_i d_s_ir
// over all queries i of a head. Each sequence of each head has its own sum, and a second pass adds
// them: no atomics. Without terms the gradients are 0.
TableGradients add_term_gradients(const RelativePositions& relative, const DistanceTerms& terms,
                                  const at::Tensor& q_BHLD, const at::Tensor& d_out_BHLD,
                                  double scale, const at::Tensor& d_q_BHLD);

}  // namespace birkhoff
