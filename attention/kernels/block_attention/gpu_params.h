// Arguments of the block-attention kernels. See attention/kernels/block_attention/gpu_body.h.
#pragma once

#include <cstdint>

#include "attention/kernels/block_attention/gpu_tiles.h"
#include "attention/kernels/common/gpu_dropout.h"
#include "attention/kernels/relative_positions/gpu_params.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// Rows of D contiguous 16-bit elements: row i of block n begins at data + batch strides[0] + head
// strides[1] + n strides[2] + i strides[3]. Aligned to 16 bytes; strides are multiples of 8.
struct BlockRowsParams {
  std::uint16_t* data;
  std::int64_t strides[4];
};

// The keys of a block that the queries of block n see: data[batch strides[0] + key head strides[1]
// + n strides[2] + query strides[3] + key strides[4]]. Null: all.
struct BlockMaskParams {
  const bool* data;
  std::int64_t strides[5];
};

// Added to the logits of a key: data[batch strides[0] + key head strides[1] + n strides[2] + key
// strides[3]]. Null: nothing. A source with a bias has only offset 0.
struct KeyBiasParams {
  const std::uint16_t* data;
  std::int64_t strides[4];
  float* gradient;  // backward: [batch, key heads, blocks, block]; null if data is
};

// Keys in blocks, like KeyBlocks in attention/kernels/block_attention/block_attention.h.
struct KeySourceParams {
  KeyWindow window;
  int first_mask;  // index in BlockAttentionParams::masks of the first offset's mask
  BlockRowsParams k, v;
  KeyBiasParams bias;
  BlockRowsParams d_k, d_v;  // backward: all rows are written
  bool in_place;             // distances apply to these keys; at most one source
};

// A logit of each query head that takes part in its softmax, with value 0: data[head stride]. Null:
// none.
struct SinkParams {
  const std::uint16_t* data;
  std::int64_t stride;
};

// Dropout on probabilities [batch, heads, blocks, block, columns]. This call uses the columns from
// first_column on, which is beyond `columns` if other ranks have heads before these.
struct BlockDropoutParams : DropoutParams {
  std::int64_t first_column, columns;
};

struct BlockAttentionParams {
  static constexpr int kMaxSources = 4;
  static constexpr int kMaxMasks = 16;  // offsets of all sources together
  static constexpr int kMaxHeadDim = 256;

  KernelDtype dtype;                          // kBFloat16 or kHalf
  int batch, heads, blocks, block, head_dim;  // of queries; head_dim: a multiple of 8
  int group;                                  // query heads of each key head
  float scale;                                // of q . k
  BlockRowsParams q, out;
  float *max, *inverse_sum;  // [batch, heads, blocks, block]
  int num_sources;
  KeySourceParams sources[kMaxSources];
  BlockMaskParams masks[kMaxMasks];
  SinkParams sinks;
  DistanceParams distances;  // [batch, heads, blocks, block, rows]
  BlockDropoutParams dropout;

  // Backward only.
  BlockRowsParams d_out, d_q;
  float* delta;  // [batch, heads, blocks, block]

  BIRKHOFF_HOST_DEVICE int key_heads() const { return heads / group; }
  bool has_values() const { return distances.p != nullptr; }  // relative positions of values
  // Whether a thread block that owns `rows` queries of a block owns all queries that see its keys.
  // It then computes the keys' gradients together with the queries'.
  bool owns_keys(int rows) const {
    bool owns = group == 1 && block <= rows && !has_values();
    for (int s = 0; s < num_sources; ++s) {
      owns = owns && sources[s].window.first_offset == 0 && sources[s].window.last_offset == 0;
    }
    return owns;
  }
};

// Asynchronous on `stream`. Head dims up to kHeadDim: 64, 128 or 256 (instantiations/).
template <int kHeadDim>
void launch_forward_of(const BlockAttentionParams& params, CUstream_st* stream);
template <int kHeadDim>
void launch_backward_of(const BlockAttentionParams& params, CUstream_st* stream);
extern template void launch_forward_of<64>(const BlockAttentionParams&, CUstream_st*);
extern template void launch_forward_of<128>(const BlockAttentionParams&, CUstream_st*);
extern template void launch_forward_of<256>(const BlockAttentionParams&, CUstream_st*);
extern template void launch_backward_of<64>(const BlockAttentionParams&, CUstream_st*);
extern template void launch_backward_of<128>(const BlockAttentionParams&, CUstream_st*);
extern template void launch_backward_of<256>(const BlockAttentionParams&, CUstream_st*);

inline void launch_block_attention(const BlockAttentionParams& params, CUstream_st* stream) {
  with_head_dim(params.head_dim,
                [&]<int kHeadDim>() { launch_forward_of<kHeadDim>(params, stream); });
}
inline void launch_block_attention_backward(const BlockAttentionParams& params,
                                            CUstream_st* stream) {
  with_head_dim(params.head_dim,
                [&]<int kHeadDim>() { launch_backward_of<kHeadDim>(params, stream); });
}

}  // namespace birkhoff
