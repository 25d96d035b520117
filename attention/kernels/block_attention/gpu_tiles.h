// Index arithmetic of the block-attention kernels: their tiles. For both g++ and nvcc: no LibTorch
// here.
#pragma once

#include <cstdint>

#include "attention/kernels/common/key_window.h"
#include "attention/kernels/tile_attention/gpu_tiles.h"
#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// Iterates over the tiles of keys that a thread block's queries of block n see: source by source,
// offset by offset. `last_tile` is the first query of its last tile. Source has a member `window`.
template <typename Source>
class KeyTiles {
 public:
  BIRKHOFF_HOST_DEVICE KeyTiles(const Source* sources, int num_sources, int num_blocks, int block,
                                int n, int last_tile)
      : sources_(sources),
        num_sources_(num_sources),
        num_blocks_(num_blocks),
        block_(block),
        n_(n),
        last_tile_(last_tile),
        offset_(num_sources > 0 ? sources[0].window.first_offset : 0) {}

  // Moves to the next tile; the first call moves to the first tile. Returns false if there is none.
  BIRKHOFF_HOST_DEVICE bool next() {
    first_key_ += kTileRows;
    while (source_ < num_sources_) {
      const KeyWindow& window = sources_[source_].window;
      const int key_block = n_ + offset_;
      const int end_key = window.causal && offset_ == 0 ? last_tile_ + 1 : block_;
      if (key_block >= 0 && key_block < num_blocks_ && first_key_ < end_key) return true;
      first_key_ = 0;
      if (++offset_ > window.last_offset && ++source_ < num_sources_) {
        offset_ = sources_[source_].window.first_offset;
      }
    }
    return false;
  }

  BIRKHOFF_HOST_DEVICE int source() const { return source_; }
  BIRKHOFF_HOST_DEVICE int offset() const { return offset_; }
  BIRKHOFF_HOST_DEVICE int first_key() const { return first_key_; }

 private:
  const Source* sources_;
  int num_sources_, num_blocks_, block_, n_, last_tile_;
  int source_ = 0, offset_, first_key_ = -kTileRows;
};

// Iterates over the tiles of queries that see keys [first_key, first_key + kTileRows) of block m,
// in each of the `group` query heads that read the keys' head. `window` must outlive it.
class QueryTiles {
 public:
  BIRKHOFF_HOST_DEVICE QueryTiles(const KeyWindow& window, int group, int num_blocks, int block,
                                  int m, int first_key)
      : window_(window),
        group_(group),
        num_blocks_(num_blocks),
        block_(block),
        m_(m),
        first_key_(first_key),
        offset_(window.first_offset),
        first_query_(first_of_offset() - kTileRows) {}

  BIRKHOFF_HOST_DEVICE bool next() {
    first_query_ += kTileRows;
    for (;;) {
      while (offset_ <= window_.last_offset) {
        if (n() >= 0 && n() < num_blocks_ && first_query_ < block_) return true;
        ++offset_;
        first_query_ = first_of_offset();
      }
      if (head_ + 1 == group_) return false;
      ++head_;
      offset_ = window_.first_offset;
      first_query_ = first_of_offset();
    }
  }

  BIRKHOFF_HOST_DEVICE int head() const { return head_; }  // in the group
  BIRKHOFF_HOST_DEVICE int n() const { return m_ - offset_; }
  BIRKHOFF_HOST_DEVICE int offset() const { return offset_; }
  BIRKHOFF_HOST_DEVICE int first_query() const { return first_query_; }

 private:
  BIRKHOFF_HOST_DEVICE int first_of_offset() const {
    return window_.causal && offset_ == 0 ? first_key_ : 0;
  }

  const KeyWindow& window_;
  int group_, num_blocks_, block_, m_, first_key_, offset_, first_query_, head_ = 0;
};

}  // namespace birkhoff
