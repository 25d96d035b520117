// The keys of block attention as the CPU loop reads them: tiles of a source's blocks, and the sums
// of their gradients. Used by cpu_tasks.cpp. Legend: B batch, H heads, N blocks, b tokens per
// block, D head dim, T number type.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/kernels/common/cpu_vector.h"
#include "attention/kernels/common/key_window.h"
#include "attention/kernels/common/limits.h"
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

// Sums of the gradients of one source's keys. They are in scratch, for the `reach` blocks that the
// current block of queries may see: a block that comes into reach takes the slot of the block that
// left it. Or they are where the gradients will be, and a task owns the head: the first tile of
// queries that sees a tile of keys writes, later tiles add.
template <typename T>
struct KeySums {
  Sum<T>* data = nullptr;  // in scratch; null: in place, or one tile of queries sees each tile
  std::int64_t reach = 0, block = 0, head_dim = 0;
  std::vector<char> written{};     // in place: whether each tile of keys is, [N, tiles of a block]
  std::vector<Sum<T>> unwanted{};  // a row for gradients of zeros that are not keys

  // The sums of one block of keys: d_k, then d_v, [2, b, D].
  std::int64_t block_size() const { return 2 * block * head_dim; }
  Sum<T>* of(std::int64_t key_block) const { return data + key_block % reach * block_size(); }
  Rows<Sum<T>> d_k(std::int64_t key_block, std::int64_t row) const {
    return {of(key_block) + row * head_dim, head_dim};
  }
  Rows<Sum<T>> d_v(std::int64_t key_block, std::int64_t row) const {
    return d_k(key_block, block + row);
  }

  // Sets the destination of a tile's gradients: the keys of a block from row `row` on. `to_k` and
  // `to_v` are the rows of the finished gradients.
  void take(std::int64_t key_block, std::int64_t row, Rows<T> to_k, Rows<T> to_v,
            KeyTile<T>& tile) {
    if (data) {
      tile.d_k_sum = d_k(key_block, row);
      tile.d_v_sum = d_v(key_block, row);
      return;
    }
    tile.d_k = to_k;
    tile.d_v = to_v;
    if constexpr (std::is_same_v<T, Sum<T>>) {
      if (written.empty()) return;
      const std::int64_t place = key_block * ((block + kTile - 1) / kTile) + row / kTile;
      if (std::exchange(written[static_cast<std::size_t>(place)], 1)) {
        tile.d_k_sum = to_k;
        tile.d_v_sum = to_v;
      }
    }
  }
};

// The block of keys that each block of queries chose, and its weight. All contiguous.
template <typename T>
struct ChosenBlocks {
  at::Tensor blocks_BHN, weights_BHN;  // undefined: queries see the window's blocks
  at::Tensor d_weights_BHN;            // the gradient sums in fp64; undefined: not wanted

  bool defined() const { return blocks_BHN.defined(); }
  std::int64_t place(std::int64_t batch, std::int64_t head, std::int64_t n) const {
    return (batch * blocks_BHN.size(1) + head) * blocks_BHN.size(2) + n;
  }
  std::int64_t block(std::int64_t place) const {
    return blocks_BHN.const_data_ptr<std::int64_t>()[place];
  }
  Sum<T> weight(std::int64_t place) const {
    return to_sum(static_cast<const T*>(weights_BHN.const_data_ptr())[place]);
  }
  double* d_weight(std::int64_t place) const {
    return d_weights_BHN.defined() ? d_weights_BHN.mutable_data_ptr<double>() + place : nullptr;
  }
};

// One KeyBlocks entry as the kernels see it.
template <typename T>
struct KeySource {
  BlockRows<const T> k, v;
  BlockRows<T> d_k, d_v;
  // Several tiles of queries add to the gradients of a tile of keys: in scratch, or in place.
  bool summed = false, summed_in_place = false;
  std::optional<std::size_t> shared;  // the source to whose sums it adds, which has the same keys
  bool in_place = false;              // its keys have positions
  // KeySums of blocks that two runs see: [2, B, H, runs - 1, reach - 1, 2, b, D], the earlier run's
  // first.
  at::Tensor border_sums;
  ChosenBlocks<T> chosen;
  KeyWindow window;
  KeyWindow summed_window;             // the blocks to whose sums block n of queries may add
  std::int64_t first_column;           // of its keys, among the keys of all sources
  std::vector<at::Tensor> mask_BHNbb;  // [B, H, N, b, b], one for each offset; may be undefined
  at::Tensor bias_BHNbb;               // [B, H, N, b, b], or undefined
  at::Tensor d_bias_BHNbb;             // the gradient sums in fp64; undefined: not wanted

  std::int64_t reach() const { return summed_window.num_offsets(); }
  // Whether only one tile of queries of each head sees each tile of keys.
  bool is_owned(std::int64_t block) const {
    return window.is_own_block() && !chosen.defined() && block <= kTile;
  }

  // Appends the tiles that queries [first_query, ..) of block n see. `positions` has one entry per
  // token; null without relative positions.
  void add_tiles(std::int64_t batch, std::int64_t head, std::int64_t n, std::int64_t num_blocks,
                 std::int64_t block, std::int64_t first_query, const std::int32_t* positions,
                 KeySums<T>& sums, std::vector<KeyTile<T>>& tiles) const {
    for (std::int64_t offset = window.first_offset; offset <= window.last_offset; ++offset) {
      const std::int64_t place = chosen.defined() ? chosen.place(batch, head, n) : 0;
      const std::int64_t source = chosen.defined() ? chosen.block(place) : n + offset;
      if (source < 0 || source >= num_blocks) continue;
      const bool of_zeros = chosen.defined() && chosen.weight(place) == 0;
      const bool own_past = window.causal && offset == 0;
      const std::int64_t end_key = own_past ? first_query + 1 : block;
      const at::Tensor& mask = mask_BHNbb[static_cast<std::size_t>(offset - window.first_offset)];
      for (std::int64_t j = 0; j < end_key; j += kTile) {
        KeyTile<T>& tile = tiles.emplace_back();
        tile.num_keys = static_cast<int>(std::min<std::int64_t>(kTile, block - j));
        if (of_zeros) {
          static constexpr T kZeros[kMaxTileHeadDim] = {};
          tile.k = tile.v = {kZeros, 0};
          tile.d_k_sum = tile.d_v_sum = {sums.unwanted.data(), 0};
        } else {
          tile.k = k.rows(batch, head, source, j);
          tile.v = v.rows(batch, head, source, j);
          sums.take(source, j, d_k.rows(batch, head, source, j), d_v.rows(batch, head, source, j),
                    tile);
        }
        if (chosen.defined() && !of_zeros) {
          tile.weight = chosen.weight(place);
          tile.d_weight = chosen.d_weight(place);
        }
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
