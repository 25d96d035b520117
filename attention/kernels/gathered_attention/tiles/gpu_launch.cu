// Chooses the tensor-core kernels of attention over gathered rows by head dim. gpu_forward.h and
// gpu_backward.h describe what they compute, own and keep in shared memory.
#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/tile_attention/gpu_tiles.h"

namespace birkhoff {

// Defined in gpu_launch.cuh, for the kHeadDim of instantiations/.
template <int kHeadDim>
void launch_forward_of(const GatheredParams& params, CUstream_st* stream);
template <int kHeadDim>
void launch_backward_of(const GatheredParams& params, CUstream_st* stream);

void launch_gathered_tiles(const GatheredParams& params, CUstream_st* stream) {
  with_head_dim(params.head_dim,
                [&]<int kHeadDim>() { launch_forward_of<kHeadDim>(params, stream); });
}

void launch_gathered_tiles_backward(const GatheredParams& params, CUstream_st* stream) {
  with_head_dim(params.head_dim,
                [&]<int kHeadDim>() { launch_backward_of<kHeadDim>(params, stream); });
}

}  // namespace birkhoff
