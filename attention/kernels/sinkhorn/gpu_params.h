// Arguments of the GPU kernels of the Sinkhorn operator. See
// attention/kernels/sinkhorn/gpu_launch.cu, gpu_prefix.cu, gpu_small_prefix.cu and
// gpu_cumulative.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// balance(), prefix_balance() or cumulative_balance() (sinkhorn.h).
enum class BalanceKind { kWhole, kPrefix, kCumulative };

// Problems of one size, contiguous fp32: matrices [matrices, rows, columns], square ones but for
// whole balances. A prefix balance solves a matrix once for each destination u from first_row on:
// only rows 1 to u and the leading u columns take part, and only row u is the result.
struct BalanceParams {
  std::int64_t matrices;
  int rows, columns;  // at most kMaxBlocks
  int iterations;
  BalanceKind kind;
  int first_row;        // 0 but for prefixes
  int results;          // problems per matrix: rows - first_row of prefixes, else 1
  const float* scores;  // [matrices, rows, columns]
  float* p;             // forward: [matrices, rows - first_row, columns]
  // Forward of whole balances: P rounded to 16 bits, [matrices, rows, rounded_columns(columns)], 0
  // beyond the last column, aligned to 16 bytes. Null: not wanted.
  void* rounded;
  KernelDtype rounded_dtype;  // kBFloat16 or kHalf
  float* scratch;             // scratch_per_matrix() elements for each matrix, aligned to 16 bytes

  static constexpr int kMaxBlocks = 256;
  static constexpr int kMaxCumulativeIterations = 20;
  static constexpr int kTile = 32;  // side of a tile; each tile has its own limit (gpu_prefix.cu)

  BIRKHOFF_HOST_DEVICE bool prefix() const { return kind == BalanceKind::kPrefix; }

  // Rounds up to whole float4.
  BIRKHOFF_HOST_DEVICE static constexpr int padded(int size) { return (size + 3) / 4 * 4; }

  // Rounds up to whole 16 bytes of 16-bit elements.
  BIRKHOFF_HOST_DEVICE static constexpr int rounded_columns(int columns) {
    return (columns + 7) / 8 * 8;
  }

  BIRKHOFF_HOST_DEVICE int num_tiles() const {
    const int side = (rows + kTile - 1) / kTile;
    return side * side;
  }
  // Prefixes of matrices of at most this many rows take the kernels of gpu_small_prefix.cu.
  static constexpr int kMaxSmallRows = 64;

  // 0 but for prefixes: the size of E, its transpose and struct PrefixScratch
  // (gpu_prefixes.cuh).
  std::int64_t scratch_per_matrix() const {
    if (!prefix()) return 0;
    return 2 * kTile * kTile * num_tiles() + num_tiles() + results;
  }
};

struct BalanceBackwardParams {
  BalanceParams problems;  // its p is not used
  const float* d_p;        // same shape as p
  float* vectors;          // scratch: vectors_per_matrix() elements per matrix, aligned to 16 bytes
  float* d_scores;         // same shape as scores

  // In gpu_prefix.cu a vector of prefix u holds u + 1 elements, rounded up to whole sectors of 32
  // bytes. The sum of these lengths for all prefixes before u:
  BIRKHOFF_HOST_DEVICE static constexpr int prefix_length(int u) { return (u + 8) / 8 * 8; }
  BIRKHOFF_HOST_DEVICE static constexpr int lengths_before(int u) {
    return 8 * (u / 8 + 1) * (u / 8 * 4 + u % 8);
  }

  // Two row vectors and two column vectors for each iteration; of a cumulative balance a column
  // vector for each row, and a row vector.
  BIRKHOFF_HOST_DEVICE static std::int64_t vectors_per_matrix(const BalanceParams& problems) {
    if (problems.kind == BalanceKind::kCumulative) {
      return std::int64_t{problems.iterations} * problems.rows * (problems.columns + 1);
    }
    const int rows_and_columns =
        problems.prefix() && problems.rows > BalanceParams::kMaxSmallRows
            ? 2 * (lengths_before(problems.rows) - lengths_before(problems.first_row))
            : problems.results *
                  (BalanceParams::padded(problems.rows) + BalanceParams::padded(problems.columns));
    return std::int64_t{problems.iterations} * 2 * rows_and_columns;
  }
};

// Asynchronous on `stream`. The first two are for all kinds.
void launch_balance(const BalanceParams& params, CUstream_st* stream);
void launch_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
void launch_cumulative_balance(const BalanceParams& params, CUstream_st* stream);
void launch_cumulative_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
// The same for the prefixes of at least one matrix, with more than kMaxSmallRows rows or fewer.
void launch_prefix_balance(const BalanceParams& params, CUstream_st* stream);
void launch_prefix_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
namespace small_prefix {
void launch_prefix_balance(const BalanceParams& params, CUstream_st* stream);
void launch_prefix_balance_backward(const BalanceBackwardParams& params, CUstream_st* stream);
}  // namespace small_prefix

}  // namespace birkhoff
