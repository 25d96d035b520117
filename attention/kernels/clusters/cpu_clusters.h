// clusters.h on the CPU. Legend: see there. S is the type of sums. Results have the same bits for
// any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/clusters/cluster_gradients.h"
#include "attention/kernels/clusters/clusters.h"

namespace birkhoff {

// Fills in `rows`; returns the inverse norms [B, H, L], in S; 0 for x = 0.
at::Tensor cluster_rows_on_cpu(const ClusterProblem& problem, ClusteredRows& rows);

// d_x_BHLD.
at::Tensor cluster_gradients_on_cpu(const ClusterGradientProblem& problem);

at::Tensor cluster_sums_on_cpu(const ClusterProblem& problem, const ClusteredRows& rows);

}  // namespace birkhoff
