// The keys of block attention as the CPU loop reads them: tiles of a source's blocks, and the sums
// of their gradients. Used by cpu_tasks.cpp. Legend: B batch, H heads, N blocks, b tokens per block,
// D head dim, T number type.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention/kernels/common/key_window.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {

// Pointer and strides of a [B, H, N, b, D] tensor of T, which may be const. Null for an undefined
// tensor.
template <typename T>
struct BlockRows {
  T* data = nullptr;
  std::array<std::int64_t, 4> strides{};  // of B, H, N, b

  BlockRows() = default;
  explicit BlockRows(const at::Tensor& x_BHNbD) {
    if (!x_BHNbD.defined()) return;
    if constexpr (std::is_const_v<T>) {
      data = static_cast<T*>(x_BHNbD.const_data_ptr());
    } else {
      data = static_cast<T*>(x_BHNbD.mutable_data_ptr());
    }
    for (std::size_t i = 0; i < 4; ++i) strides[i] = x_BHNbD.stride(static_cast<std::int64_t>(i));
  }

  // The rows of a block, from row `first` on.
  Rows<T> rows(std::int64_t batch, std::int64_t head, std::int64_t block,
               std::int64_t first) const {
    if (!data) return {};
    return {data + batch * strides[0] + head * strides[1] + block * strides[2] + first * strides[3],
            strides[3]};
  }
};

// Sums, in scratch, of the gradients of one source's keys, for the `reach` blocks that the current
// block of queries sees. A block that comes into reach takes the place of the block that left it.
template <typename T>
struct KeySums {
  Sum<T>* data = nullptr;  // null: only one tile of queries sees each tile of keys
  std::int64_t reach = 0, block = 0, head_dim = 0;

  // The sums of one block of keys: d_k, then d_v, [2, b, D].
  std::int64_t block_size() const { return 2 * block * head_dim; }
  Sum<T>* of(std::int64_t key_block) const { return data + key_block % reach * block_size(); }
  Rows<Sum<T>> d_k(std::int64_t key_block, std::int64_t row) const {
    return {of(key_block) + row * head_dim, head_dim};
  }
  Rows<Sum<T>> d_v(std::int64_t key_block, std::int64_t row) const {
    return d_k(key_block, block + row);
  }
};

// One KeyBlocks entry as the kernels see it.
template <typename T>
struct KeySource {
  BlockRows<const T> k, v;
  BlockRows<T> d_k, d_v;
  bool summed = false;  // several tiles of queries add to the gradients of a tile of keys
  bool in_place = false;
  // KeySums of blocks that two runs see: [2, B, H, runs - 1, reach - 1, 2, b, D], the earlier run's
  // first.
  at::Tensor border_sums;
  KeyWindow window;
  std::int64_t first_column;           // of its keys, among the keys of all sources
  std::vector<at::Tensor> mask_BHNbb;  // [B, H, N, b, b], one for each offset; may be undefined
  at::Tensor bias_BHNbb;               // [B, H, N, b, b], or undefined
  at::Tensor d_bias_BHNbb;             // the gradient sums in fp64; undefined: not wanted

  std::int64_t reach() const { return window.num_offsets(); }
  // Whether only one tile of queries of each head sees each tile of keys.
  bool is_owned(std::int64_t block) const { return window.is_own_block() && block <= kTile; }

  // Appends the tiles that queries [first_query, ..) of block n see. `positions` are those of all
  // tokens; null without relative positions.
  void add_tiles(std::int64_t batch, std::int64_t head, std::int64_t n, std::int64_t num_blocks,
                 std::int64_t block, std::int64_t first_query, const std::int32_t* positions,
                 const KeySums<T>& sums, std::vector<KeyTile<T>>& tiles) const {
    for (std::int64_t offset = window.first_offset; offset <= window.last_offset; ++offset) {
      const std::int64_t source = n + offset;
      if (source < 0 || source >= num_blocks) continue;
      const bool own_past = window.causal && offset == 0;
      const std::int64_t end_key = own_past ? first_query + 1 : block;
      const at::Tensor& mask = mask_BHNbb[static_cast<std::size_t>(offset - window.first_offset)];
      for (std::int64_t j = 0; j < end_key; j += kTile) {
        KeyTile<T>& tile = tiles.emplace_back();
        tile.num_keys = static_cast<int>(std::min<std::int64_t>(kTile, block - j));
        tile.k = k.rows(batch, head, source, j);
        tile.v = v.rows(batch, head, source, j);
        if (sums.data) {
          tile.d_k_sum = sums.d_k(source, j);
          tile.d_v_sum = sums.d_v(source, j);
        }
        tile.d_k = d_k.rows(batch, head, source, j);
        tile.d_v = d_v.rows(batch, head, source, j);
        tile.causal = own_past && j == first_query;
        if (in_place && positions) tile.positions = positions + source * block + j;
        tile.first_element = first_column + (offset - window.first_offset) * block + j;
        const auto place_of = [&](const at::Tensor& x_BHNbb) {
          return batch * x_BHNbb.stride(0) + head * x_BHNbb.stride(1) + n * x_BHNbb.stride(2) +
                 first_query * x_BHNbb.stride(3) + j * x_BHNbb.stride(4);
        };
        if (mask.defined()) {
          tile.mask_query_stride = mask.stride(3);
          tile.mask_key_stride = mask.stride(4);
          tile.mask = mask.const_data_ptr<bool>() + place_of(mask);
        }
        if (bias_BHNbb.defined()) {
          tile.bias_query_stride = bias_BHNbb.stride(3);
          tile.bias_key_stride = bias_BHNbb.stride(4);
          tile.bias = static_cast<const T*>(bias_BHNbb.const_data_ptr()) + place_of(bias_BHNbb);
        }
        if (d_bias_BHNbb.defined()) {
          tile.d_bias_query_stride = d_bias_BHNbb.stride(3);
          tile.d_bias_key_stride = d_bias_BHNbb.stride(4);
          tile.d_bias = d_bias_BHNbb.mutable_data_ptr<double>() + place_of(d_bias_BHNbb);
        }
      }
    }
  }
};

}  // namespace birkhoff
