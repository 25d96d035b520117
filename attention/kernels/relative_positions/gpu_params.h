// Relative positions (relative_positions.h) as GPU kernels read and write them. For both g++ and
// nvcc: no LibTorch here. gpu_terms.h makes the tensors, and computes what kernels leave to it.
#pragma once

#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// For each query a number for each of `rows` rows of the tables, [.., rows] in fp32. Numbers that
// are read belong to rows of q; numbers that are written to the places of results (slots, for
// gathered rows).
struct DistanceParams {
  // q . a_r + the bias of r, added to q . k; null: there are no relative positions
  const float* scores;
  const float* of_values;  // backward: d_out . b_r, added to d_out . v; null: values have no table
  // The sums of p M over the keys of each row (gpu_forward.h of block attention). The forward pass
  // finds -infinity, because kernels on tensor cores add logarithms; the backward pass finds 0.
  // Null: values have no table.
  float* p;
  float* d_s;       // backward: the sums of d_s over the keys of each row; finds 0
  int rows, least;  // `least` is the distance of row 0

  // A key at the distance d, its position less the query's, has the row d - least, clipped to the
  // table.
  BIRKHOFF_DEVICE int clipped(int row) const {
    const int last = rows - 1;
    return row < 0 ? 0 : row > last ? last : row;
  }
  BIRKHOFF_DEVICE int row_of(int distance) const { return clipped(distance - least); }
};

}  // namespace birkhoff
