// The products of cpu_clusters.cpp, on raw pointers, without LibTorch. T is float, double or Bf16;
// sums have type S = Sum<T>. Legend: D head dim, K clusters.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels/common/number_types.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {

struct ScoreShape {
  int head_dim = 0, clusters = 0;
  double length = 1;  // of the rows of `unit`

  // K, padded to whole vectors of S.
  template <typename S>
  int padded_clusters() const {
    constexpr int kLanes = 64 / static_cast<int>(sizeof(S));
    return (clusters + kLanes - 1) / kLanes * kLanes;
  }
};

// The results of at most kTile rows.
template <typename T>
struct ScoredRows {
  int num_rows = 0;
  Rows<const T> x;
  Rows<T> unit;                  // length x / |x|
  Sum<T>* inverse = nullptr;     // 1 / |x|; 0 for x = 0
  Sum<T>* scores = nullptr;      // [kTile, padded_clusters]; -infinity in the padding
  std::int32_t* best = nullptr;  // the first cluster with the highest score
  Sum<T>* best_score = nullptr;  // NaN if all are
};

// d_x of a row from the gradient of u = x / |x| (cpu_clusters.h). Null d_unit: 0.
template <typename T>
struct RowGradient {
  const T *unit = nullptr, *d_unit = nullptr;
  Sum<T> inverse = 0, d_distance = 0;
  const Sum<T>* centroid = nullptr;  // not read if d_distance is 0
  T* d_x = nullptr;
};

template <typename T>
struct ScoreKernels {
  // centroids_DK: [D, padded_clusters], zeros in the padding. `scratch`: scratch_bytes(D), aligned
  // to 64.
  std::size_t (*scratch_bytes)(int head_dim);
  void (*score)(const ScoreShape& shape, const Sum<T>* centroids_DK, const ScoredRows<T>& rows,
                void* scratch);
  void (*row_gradient)(const ScoreShape& shape, const RowGradient<T>& row, void* scratch);
};

// For T = float, double and Bf16. kAvx512Bf16 shares the kernels of kAvx512.
template <typename T>
const ScoreKernels<T>& score_kernels(InstructionSet set);

// Defined in cpu_scores.simd.cpp, compiled for kSet.
template <InstructionSet kSet, typename T>
const ScoreKernels<T>& compiled_score_kernels();

}  // namespace birkhoff
