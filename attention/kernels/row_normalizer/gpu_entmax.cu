// The launches of the entmax kernels. gpu_entmax.h and gpu_entmax_backward.h describe what they
// compute.
#include "attention/kernels/row_normalizer/gpu_entmax.h"

#include "attention/kernels/row_normalizer/gpu_entmax_backward.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {
namespace {

// Calls f<Thread, kHeadDim>().
template <typename Function>
void with_thread(const EntmaxParams& params, Function f) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    if (params.head_dim <= 64) return f.template operator()<GpuThread<T>, 64>();
    f.template operator()<GpuThread<T>, 128>();
  });
}

}  // namespace

void launch_entmax(const EntmaxParams& params, cudaStream_t stream) {
  with_thread(params, [&]<typename Thread, int kHeadDim>() {
    launch_body<EntmaxForward<Thread, kHeadDim>>(params, stream);
  });
}

void launch_entmax_backward(const EntmaxParams& params, cudaStream_t stream) {
  with_thread(params, [&]<typename Thread, int kHeadDim>() {
    launch_body<EntmaxQueries<Thread, kHeadDim>>(params, stream);
    launch_body<EntmaxKeys<Thread, kHeadDim>>(params, stream);
  });
}

}  // namespace birkhoff
