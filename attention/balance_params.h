// Arguments of the kernels of the Sinkhorn operator. See attention/balance.cu.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace birkhoff {

// Problems of one size, contiguous fp32: matrices [matrices, rows, columns], each balanced as a
// whole or, with `prefix` (rows = columns = N), once for each destination u from first_row on: rows
// 1 to u and the leading u columns, of which row u alone is the result.
struct BalanceParams {
  std::int64_t matrices;
  int rows, columns;  // at most kMostBlocks
  int iterations;
  bool prefix;
  int first_row;        // 0 without `prefix`
  int results;          // problems of a matrix: rows - first_row with `prefix`, else 1
  const float* scores;  // [matrices, rows, columns]
  float* p;             // forward: [matrices, rows - first_row, columns]

  static constexpr int kMostBlocks = 256;
};

struct BalanceBackwardParams {
  BalanceParams problems;  // its p: not used
  const float* d_p;        // as p
  float* vectors;          // scratch, vectors_per_matrix() numbers for each matrix
  float* d_scores;         // as scores

  static std::int64_t vectors_per_matrix(const BalanceParams& problems) {
    return std::int64_t{problems.results} * problems.iterations * 2 *
           (problems.rows + problems.columns);
  }
};

// Asynchronous on `stream`.
void launch_balance(const BalanceParams& params, CUstream_st* stream);
void launch_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);

}  // namespace birkhoff
