// Chooses the block-attention kernels by head dim. gpu_forward.h and gpu_backward.h describe what
// they compute, own and keep in shared memory.
#include "attention/kernels/block_attention/gpu_params.h"

namespace birkhoff {

// Defined in gpu_launch.cuh, for the kHeadDim of instantiations/.
template <int kHeadDim>
void launch_forward_of(const BlockAttentionParams& params, CUstream_st* stream);
template <int kHeadDim>
void launch_backward_of(const BlockAttentionParams& params, CUstream_st* stream);

void launch_block_attention(const BlockAttentionParams& params, CUstream_st* stream) {
  with_head_dim(params.head_dim,
                [&]<int kHeadDim>() { launch_forward_of<kHeadDim>(params, stream); });
}

void launch_block_attention_backward(const BlockAttentionParams& params, CUstream_st* stream) {
  with_head_dim(params.head_dim,
                [&]<int kHeadDim>() { launch_backward_of<kHeadDim>(params, stream); });
}

}  // namespace birkhoff
