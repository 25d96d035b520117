// Random problems of attention with a sparse normalizer, and their solution by the reference.
// Legend: see attention/kernels/row_normalizer/row_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "attention/kernels/row_normalizer/row_attention.h"

namespace birkhoff::test {

struct RowAttentionProblem {
  RowAttention attention;
  at::Tensor d_out_BHLD;

  RowAttentionProblem to(at::ScalarType dtype) const;
};

struct RowAttentionSize {
  std::int64_t queries, keys, head_dim;
  bool causal;             // the queries are the last of the tokens
  bool distances = false;  // with terms of distances
};
// B = 2, H = 2, in the layers' layout. The first sample has all keys, if causal up to the query's
// own; the second has documents (causal) or padding, and query 7, if there is one, sees no key.
RowAttentionProblem random_rows(const RowAttentionSize& size, const RowNormalizer& normalizer,
                                at::ScalarType dtype);

// out, d_q, d_k, d_v and, if there are exponents and terms of distances, their gradients, as
// DenseAttention's reference computes them.
std::vector<at::Tensor> solve_by_reference(const RowAttentionProblem& problem);

// Checks that the errors of `solve`, which returns what solve_by_reference() does, are at most
// twice those of the reference.
void expect_errors_of_the_reference(
    const RowAttentionProblem& problem,
    const std::function<std::vector<at::Tensor>(const RowAttentionProblem&)>& solve,
    const std::string& name);

}  // namespace birkhoff::test
