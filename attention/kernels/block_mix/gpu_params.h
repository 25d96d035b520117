// Arguments of the GPU kernels of block mixing. See attention/kernels/block_mix/gpu_products.h.
#pragma once

#include <cstdint>

#include "attention/kernels/block_attention/gpu_params.h"
#include "cluster/base/gpu/kernel_source.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct BlockMixParams {
  static constexpr int kMaxBlocks = 512;       // shared memory holds a slab of all rows
  static constexpr int kMaxTensors = 2;        // keys and values
  static constexpr int kMaxColumns = 1 << 29;  // block x head_dim; columns are counted in 32 bits

  KernelDtype dtype;                          // kBFloat16 or kHalf; also of the weights
  int batch, heads, blocks, block, head_dim;  // head_dim: a multiple of 8
  int diagonal;                               // -blocks .. blocks - 1
  // Row u of the weights begins at weights + batch strides[0] + head strides[1] + u strides[2]:
  // aligned to 16 bytes, strides multiples of 8, zeros up to the next multiple of 8 columns.
  const std::uint16_t* weights;
  std::int64_t weight_strides[3];
  // MixPadding (block_mix.h). lengths [B]; null: no padding. The second set of weights begins at
  // weights + second_set.
  const std::int64_t* lengths;
  std::int64_t second_set;
  int num_tensors;
  BlockRowsParams x[kMaxTensors], y[kMaxTensors];

  // Backward only.
  BlockRowsParams d_y[kMaxTensors], d_x[kMaxTensors];
  BlockRowsParams others[kMaxTensors];  // added to d_x; data null: nothing to add
  int parts;  // number of parts of the columns that d_w of a set sums over
  // [sets, parts, batch, heads, blocks, blocks]: parts sum to d_w; all is written.
  float* d_weights;

  BIRKHOFF_HOST_DEVICE int sets() const { return lengths == nullptr ? 1 : 2; }
};

// Asynchronous on `stream`.
void launch_block_mix(const BlockMixParams& params, CUstream_st* stream);
void launch_block_mix_backward(const BlockMixParams& params, CUstream_st* stream);

}  // namespace birkhoff
