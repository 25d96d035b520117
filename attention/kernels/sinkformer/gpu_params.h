// Arguments of the GPU's kernels of doubly stochastic attention (gpu_forward.h, gpu_backward.h).
// Legend: B batch, H heads, L queries, S keys, T half-steps.
#pragma once

#include <cstdint>

#include "attention/kernels/common/gpu_rows.h"
#include "attention/kernels/tile_attention/gpu_tiles.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// Queries or keys. All rows are aligned to 16 bytes: data and strides.
struct SinkformerSide {
  int size;                     // L or S
  const std::int64_t* lengths;  // [B], device memory: n or m of each sequence; null: `size`
  RowsParams rows;              // q or k
  RowsParams values;            // d_out (backward) or v
  // Of half-steps 1, 3, .. or 2, 4, ..: f or g, times log2(e), and in the backward pass the
  // coefficients of gpu_backward.h: [B, H, vectors, padded()].
  int vectors;
  float *potentials, *coefficients;
  RowsParams d_rows;  // backward: d_q or d_k; only rows that exist are written

  // Values of a vector: whole tiles, so that kernels read them without a check. Those past the end
  // of the last tile with a row that exists are 0.
  BIRKHOFF_HOST_DEVICE int padded() const { return (size + kTileRows - 1) / kTileRows * kTileRows; }
};

struct SinkformerParams {
  static constexpr int kMaxHeadDim = 128;

  KernelDtype dtype;           // kBFloat16 or kHalf
  int batch, heads, head_dim;  // head_dim: a multiple of 8
  float scale;                 // of q . k
  int half_steps;              // T
  SinkformerSide queries, keys;
  RowsParams out;  // forward; only rows that exist are written

  // Backward.
  bool unrolled;   // or the potentials count as constants
  RowsParams d_v;  // only rows that exist are written

  // The half-step t that a kernel computes. Its thread blocks own the rows of that side.
  int step;

  // Odd half-steps normalize rows of scores, which are queries; even ones columns.
  BIRKHOFF_HOST_DEVICE const SinkformerSide& side(int t) const {
    return t % 2 == 1 ? queries : keys;
  }
};

// Asynchronous on `stream`. Head dims up to kHeadDim: 64 or 128 (instantiations/).
template <int kHeadDim>
void launch_sinkformer_of(const SinkformerParams& params, CUstream_st* stream);
template <int kHeadDim>
void launch_sinkformer_backward_of(const SinkformerParams& params, CUstream_st* stream);
extern template void launch_sinkformer_of<64>(const SinkformerParams&, CUstream_st*);
extern template void launch_sinkformer_of<128>(const SinkformerParams&, CUstream_st*);
extern template void launch_sinkformer_backward_of<64>(const SinkformerParams&, CUstream_st*);
extern template void launch_sinkformer_backward_of<128>(const SinkformerParams&, CUstream_st*);

// Calls f<kHeadDim>() with the kHeadDim of this head dim.
template <typename Function>
void with_sinkformer_head_dim(int head_dim, Function f) {
  if (head_dim <= 64) return f.template operator()<64>();
  f.template operator()<128>();
}

inline void launch_sinkformer(const SinkformerParams& params, CUstream_st* stream) {
  with_sinkformer_head_dim(params.head_dim,
                           [&]<int kHeadDim>() { launch_sinkformer_of<kHeadDim>(params, stream); });
}
inline void launch_sinkformer_backward(const SinkformerParams& params, CUstream_st* stream) {
  with_sinkformer_head_dim(params.head_dim, [&]<int kHeadDim>() {
    launch_sinkformer_backward_of<kHeadDim>(params, stream);
  });
}

}  // namespace birkhoff
