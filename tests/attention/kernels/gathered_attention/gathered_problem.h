// Random problems of attention over gathered rows. Legend: B batch, H heads, L queries, S keys, D
// head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff::test {

struct GatheredProblem {
  GatheredAttention attention;  // leaves: q, k, v, tables and sinks
  at::Tensor d_out_BHLD, d_lse_BHL;
  std::string name;

  GatheredProblem to(at::ScalarType dtype) const;
  std::vector<at::Tensor> leaves() const;
};

// Segments of unequal length, some empty, with rows that are in several, in one several times, or
// in none; every rule for what is visible; tensors that are contiguous and some that are not.
// `seed` determines everything except the numbers of tensors, which also depend on `draw_index`.
GatheredProblem random_gathered_problem(int seed, int draw_index = 0);

// The problem of that seed with relative positions, sinks and grouped queries, each for some seeds.
GatheredProblem random_problem_with_terms(int seed, int draw_index = 0);
// The same for tensor cores without relative positions, and with D = `columns`; 0: that of the
// problem.
GatheredProblem random_problem_for_tensor_cores(int seed, int draw_index, std::int64_t columns);
template <std::int64_t kColumns>
GatheredProblem random_problem_of_width(int seed, int draw_index) {
  return random_problem_for_tensor_cores(seed, draw_index, kColumns);
}

// The same with lists that have no row twice (make_permuted_lists); for some seeds the last rows
// are in no segment.
GatheredProblem random_problem_of_rows_once(int seed, int draw_index, std::int64_t columns);
template <std::int64_t kColumns>
GatheredProblem random_problem_of_rows_once(int seed, int draw_index) {
  return random_problem_of_rows_once(seed, draw_index, kColumns);
}

// The problem with terms and with dropout.
GatheredProblem random_problem_with_dropout(int seed, int draw_index = 0);
// The same for tensor cores: no segment has a key twice; for some seeds no list has a row twice.
GatheredProblem random_problem_of_distinct_keys(int seed, int draw_index = 0);

// Dense attention as one segment of rows (dense.h), causal, with documents and padding: 2 samples
// of 2 key heads and 4 heads of queries, D = 64.
GatheredProblem dense_problem(std::int64_t num_tokens);

// Dense attention to 80 tokens before the queries, too, causal, of the last `window` keys, with the
// relative positions of sinusoidal_distances.h, sinks, and 2 heads of queries a key head, D = 64.
GatheredProblem distances_problem(std::int64_t num_queries, std::int64_t window);

// Causal sliding windows of `width` tokens, D = 64.
GatheredProblem window_problem(std::int64_t batch, std::int64_t heads, std::int64_t num_tokens,
                               std::int64_t width);

// The log-sum-exp of each query, 0 for those that see no key.
at::Tensor finite_lse(const AttentionPart& part);
// Returns out, log-sum-exp (of a mean: whether a query sees a key), and the gradients of the
// leaves.
std::vector<at::Tensor> results_of(const AttentionPart& part, const GatheredProblem& problem);
std::vector<at::Tensor> solve(const GatheredProblem& problem, Path path);

// Relative error of d_out . out in the GPU kernels, which take it from the rounded out.
inline double out_rounding(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0x1p-23;
}

// Checks the largest errors of `solver` over at least `queries` queries of one shape, as
// fused_block_attention_test.cpp does for block attention: at most twice those of the reference in
// the same dtype, and two roundings. Where a query sees the same key from several slots, or has a
// gradient of its log-sum-exp, ds is a difference of products d_out . v, which the reference takes
// from one rounded product: three roundings of relative size `product_eps` of such a product are
// allowed in the gradients of q, k, sinks and the table of keys; with dropout, products of kept
// probabilities are 1 / (1 - p) times as large. The problems are those of `random_problem` with
// this merge. Returns false if the shape has too few queries to compare.
bool expect_errors_of_the_reference(
    int seed, at::ScalarType dtype, std::int64_t queries, double product_eps,
    const std::function<std::vector<at::Tensor>(const GatheredProblem&)>& solver,
    SlotMerge merge = SlotMerge::kOneSoftmax,
    GatheredProblem (*random_problem)(int seed, int draw_index) = random_gathered_problem);

}  // namespace birkhoff::test
