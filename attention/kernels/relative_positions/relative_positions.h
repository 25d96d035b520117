// Relative position representations (Shaw et al. 2018, "Self-Attention with Relative Position
// Representations", section 3.2): a query sees the key at distance r with the vector a_r added to
// the key, and b_r to its value. Distances are clipped, so that the tables are short.
//
// Legend: B batch, H heads, R rows of a table, D head dim, X blocks or segments, I queries and J
// keys of one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

struct RelativePositions {
  // The tables, of the queries' dtype; H may be 1. Row r is for keys at the distance least + r, the
  // key's position less the query's. Distances are clipped to [least, least + R - 1].
  at::Tensor keys_HRD;    // undefined: there are no relative positions
  at::Tensor values_HRD;  // undefined: values have none
  // [1 or H, R] in the type of sums (at::toOpMathType): added to the products of queries and rows
  // of keys, before the factor 1 / sqrt(D). Undefined: 0.
  at::Tensor bias_HR{};
  std::int64_t least = 0;

  bool defined() const { return keys_HRD.defined(); }
  std::int64_t num_distances() const { return keys_HRD.size(1); }
  // The same with tables as with_whole_columns() (fitting_rows.h) makes rows.
  RelativePositions with_whole_columns() const;
};

// Error(kInternal) unless the tables fit queries of `heads` heads of D elements.
void check_relative_positions(const RelativePositions& relative, const at::Tensor& q,
                              std::int64_t heads);

// The rows of the tables for int64 distances of any shape.
at::Tensor table_rows(const RelativePositions& relative, const at::Tensor& distances);

// The two terms in plain LibTorch operations, differentiable; `rows` broadcasts to [B, H, X, I, J].
// q_i a_r and the bias of r, without the factor 1 / sqrt(D):
at::Tensor relative_scores(const RelativePositions& relative, const at::Tensor& q_BHXID,
                           const at::Tensor& rows_BHXIJ);
// sum_j p_ij b_r:
at::Tensor relative_values(const RelativePositions& relative, const at::Tensor& p_BHXIJ,
                           const at::Tensor& rows_BHXIJ);

// The gradient of a table from the sums of each of N parts of the work, which may have padded rows
// and columns: `factor` times their sum, over all heads if these share the table.
at::Tensor gradient_of_table(const at::Tensor& sums_NHRD, const at::Tensor& table_HRD,
                             double factor);

}  // namespace birkhoff
