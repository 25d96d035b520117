// The part of relative positions and sinks that LibTorch's operations compute, besides the GPU's
// block-attention kernels (gpu_params.h). Legend: B batch, H heads, N blocks, b tokens per block, R
// rows of a table, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// Relative positions of keys as the kernels read them: the products q_i . a_r of each query with
// the rows of the table that keys in place can reach. So their memory grows neither with the number
// of pairs nor with rows that no pair uses. Undefined without a table or keys in place.
struct DistanceScores {
  at::Tensor scores_BHNbR;  // fp32, contiguous
  at::Tensor d_s_BHNbR;     // zeros; the kernels' backward pass adds to it
  std::int64_t first = 0;   // the table's row that is the first here
  std::int64_t least = 0;   // its distance

  bool defined() const { return scores_BHNbR.defined(); }
};
// d_s_BHNbR only if `backward`.
DistanceScores distance_scores(const BlockOperands& operands, bool backward);

// The rest of the backward pass, after the kernels. Sets the gradients of the table a
// (operands.relative.keys_HRD) and of operands.sink_H, as far as they are defined, and adds to the
// gradient of q. With d_s_ir the sum of d_s_ij over keys j at the distance of row r:
//   d_sink = -sum_i exp(sink - m_i) z_i delta_i,  d_q_id += scale sum_r d_s_ir a_rd,
//   d_a_rd = scale sum_i d_s_ir q_id
// over all queries i of a head; m, z, delta and scale as in gpu_forward.h and gpu_backward.h. Each
// sequence of each head has its own sum, and a second pass adds them: no atomics.
void add_term_gradients(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& delta_BHNb, const DistanceScores& distances,
                        BlockGradients& gradients);

}  // namespace birkhoff
