// Problems of clusters, and their results by the definition. Legend: B batch, H heads, L rows, D
// head dim, K clusters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "attention/kernels/clusters/clusters.h"

namespace birkhoff::test {

struct ClusterSizes {
  std::int64_t B, H, L, D, K, window;
  bool documents, padding;
};
std::ostream& operator<<(std::ostream& out, const ClusterSizes& sizes);

inline const ClusterSizes kClusterSizes[] = {
    {2, 2, 14, 3, 4, 5, false, false},   {2, 3, 130, 16, 9, 16, true, true},
    {1, 1, 1, 1, 1, 1, false, false},    {2, 1, 200, 64, 17, 40, false, true},
    {1, 2, 65, 33, 3, 100, true, false}, {1, 1, 64, 256, 64, 1, false, false}};

// Random rows, a leaf, which are not contiguous, and random centroids. Segments begin after a third
// of the rows, and the last row is one; their ids are not those of documents. Padding: half of the
// rows of the second sample.
ClusterProblem cluster_problem(const ClusterSizes& sizes, at::ScalarType dtype,
                               std::uint64_t seed = 5);
// Three rows that repeat, and one centroid 40 times; 20 rows are chosen.
ClusterProblem repeated_rows();

// The used slots of lists, as vectors: [head][segment].
std::vector<std::vector<std::vector<int>>> segments_of(const at::Tensor& rows_BHP,
                                                       const at::Tensor& ends_BHG);

// Checks clusters and nearest rows against a loop over scores in fp64 of the same numbers.
void expect_nearest(const ClusterProblem& problem, const ClusteredRows& rows);
// Checks those of repeated_rows(): of equal scores the first is chosen.
void expect_first_of_equal(const ClusteredRows& rows);

// unit, distance, cluster_sums(), and the gradient of x for d_unit and d_distance, which
// cluster_weights() draws, in the dtype of x's results.
struct ClusterWeights {
  at::Tensor d_unit_BHLD, d_distance_BH;
};
ClusterWeights cluster_weights(const ClusterProblem& problem);
std::vector<at::Tensor> cluster_results(const ClusterProblem& problem, Path path);
// The same problem in another dtype.
ClusterProblem in_dtype(ClusterProblem problem, at::ScalarType dtype);

// Checks results in fp32, bf16 or fp16 against those of the reference: at most twice its error.
void expect_as_exact_as_the_reference(const ClusterProblem& problem,
                                      const std::vector<at::Tensor>& results);

}  // namespace birkhoff::test
