// Arguments of the GPU kernels of clusters, made from tensors, with the results and the scratch
// memory that they need. Used by clusters.cpp. Legend: see clusters.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/kernels/clusters/cluster_gradients.h"
#include "attention/kernels/clusters/clusters.h"
#include "attention/kernels/clusters/gpu_params.h"

namespace birkhoff {

// Why the kernels do not support this, regardless of where its tensors are; empty if they do.
std::string why_not_gpu_kernels(const ClusterProblem& problem);

// `params` point to the results, `arguments` and `scratch`, which must outlive the launch.
struct ClusterForward {
  ClusterRowsParams params;
  ClusteredRows rows;
  at::Tensor inverse_BHL;  // 1 / |x|, in fp32; 0 for x = 0
  std::vector<at::Tensor> arguments, scratch;
};
ClusterForward cluster_forward(const ClusterProblem& problem);

struct ClusterBackward {
  ClusterGradientParams params;
  at::Tensor d_x_BHLD;
  std::vector<at::Tensor> arguments;
};
ClusterBackward cluster_backward(const ClusterGradientProblem& problem);

struct ClusterSums {
  ClusterSumsParams params;
  at::Tensor sums_BHKd;  // d is D + 1; their sum over samples is wanted
  std::vector<at::Tensor> arguments;
};
ClusterSums cluster_sums_of(const ClusterProblem& problem, const ClusteredRows& rows);

}  // namespace birkhoff
