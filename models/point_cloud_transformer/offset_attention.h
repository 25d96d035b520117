// Offset attention (Guo et al. 2021, "PCT: Point Cloud Transformer", section 3.2), in the form of
// the PyTorch code that reproduces the paper's results (github.com/Strawberry-Eat-Mango/
// PCT_Pytorch), and its doubly stochastic form (Sander et al. 2022, section 6.1).
//
//   E_ij = q_i . q_j,  q = x W_q (queries and keys are the same, C / 4 channels, not scaled)
//   out_j = x_j + relu(norm((x_j - sum_i P_ji v_i) W)),  v = x W_v
// P is exp(E) after T half-steps of Sinkhorn's algorithm, columns and rows in turn, rows last, so
// the weights of an output sum to 1. E is symmetric. T = 2 is PCT's attention, which divides the
// softmax of E by its column sums; the paper's code adds 1e-9 to these, which is left out here.
// T = 1 is softmax attention.
//
// W_v and W have no biases: the norm would remove them, because weights sum to 1.
//
// A composition of LibTorch operations. It stores a matrix [N, N] per set and half-step: 256 kept
// points and 2 half-steps take 0.5 MB per set and layer in fp32.
//
// Legend: B batch, N points, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "models/point_cloud_transformer/normed_linear.h"

namespace birkhoff {

// P [B, N, N] of symmetric scores E: half_steps normalizations of exp(E) in the log domain, of rows
// (dim 2) and columns in turn, rows last.
at::Tensor balanced_weights(const at::Tensor& scores_BNN, int half_steps);

class OffsetAttention {
 public:
  // The layer `number`, from 0. config must be resolved. `parameters` must outlive it.
  OffsetAttention(const configs::Config& config, std::int64_t number, Parameters& parameters);

  // [B, N, C], in the parameters' dtype, for x [B, N, C]. Collective as BatchNorm.
  at::Tensor operator()(const at::Tensor& x_BNC, bool training, NamedSums& sums) const;
  double forward_flops(std::int64_t num_points) const;

 private:
  const Parameters& parameters_;
  int unit_;  // Parameters::begin_unit()
  int half_steps_;
  std::int64_t channels_;
  Linear query_, value_;
  NormedLinear output_;
};

}  // namespace birkhoff
