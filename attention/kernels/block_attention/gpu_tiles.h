// Index arithmetic of the block-attention kernels: which tiles there are, and where tensor cores
// expect their numbers. For both g++ and nvcc: no LibTorch here.
#pragma once

#include <cstdint>

#include "attention/kernels/common/key_window.h"
#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// Queries or keys per tile: 16 rows for each of four warps. 64 is the usual block size.
constexpr int kTileRows = 64;

// Sizes of a kernel for head dims up to kHeadDim (64, 128 or 256), for host and device. The thread
// blocks of a multiprocessor share 164 KiB (sm_80) or 228 KiB (sm_90), of which each of them loses
// 1 KiB; a single one can have 163 or 227 KiB.
template <int kHeadDim>
struct BlockAttentionShape {
  // Columns of a result that one warp keeps in registers; two warps share the rows of wider
  // results.
  static constexpr int kWarpColumns = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kWarpsOfRow = kHeadDim / kWarpColumns;
  static constexpr int kThreads = kWarpsOfRow * kTileRows / 16 * 32;
  // Tiles in flight. With 2, the next tile loads while the current one is in use.
  static constexpr int kForwardStages = 2;
  static constexpr int kBackwardStages = kHeadDim <= 128 ? 2 : 1;

  // Thread blocks that a multiprocessor should run at once, which bounds their registers. More than
  // one only where the compiler then spills no registers.
  static constexpr int kForwardBlocks = kHeadDim == 64 ? 4 : 1;
  static constexpr int kQueriesBlocks = kHeadDim == 64 ? 3 : 1;
  static constexpr int kKeysBlocks = 1;

  // Bytes of a tile of rows, of a tile of probabilities, and of one number per row.
  static constexpr int kRowsBytes = kTileRows * kHeadDim * 2;
  static constexpr int kPairsBytes = kTileRows * kTileRows * 2;
  static constexpr int kNumbersBytes = kTileRows * 4;

  // q; k and v of each stage; bias.
  static constexpr int kForwardBytes = (1 + 2 * kForwardStages) * kRowsBytes + kNumbersBytes;
  // q and d_out; k and v of each stage; p and d_s; bias, maximum, inverse sum, and delta, which has
  // one part for each warp of a row.
  static constexpr int kQueriesBytes =
      (2 + 2 * kBackwardStages) * kRowsBytes + 2 * kPairsBytes + (3 + kWarpsOfRow) * kNumbersBytes;
  // k and v; q, d_out, maximum, inverse sum and delta of each stage; bias.
  static constexpr int kKeysBytes =
      2 * kRowsBytes + kBackwardStages * (2 * kRowsBytes + 3 * kNumbersBytes) + kNumbersBytes;

  static constexpr int kMostBytes = 163 * 1024;  // sm_80
  static_assert(kForwardBytes <= kMostBytes && kQueriesBytes <= kMostBytes &&
                kKeysBytes <= kMostBytes);
};

// ---- Tiles.

// Iterates over the tiles of keys that queries [first_query, first_query + kTileRows) of block n
// see: source by source, offset by offset. Source has a member `window`.
template <typename Source>
class KeyTiles {
 public:
  BIRKHOFF_HOST_DEVICE KeyTiles(const Source* sources, int num_sources, int num_blocks, int block,
                                int n, int first_query)
      : sources_(sources),
        num_sources_(num_sources),
        num_blocks_(num_blocks),
        block_(block),
        n_(n),
        first_query_(first_query),
        offset_(num_sources > 0 ? sources[0].window.first_offset : 0) {}

  // Moves to the next tile; the first call moves to the first tile. Returns false if there is none.
  BIRKHOFF_HOST_DEVICE bool next() {
    first_key_ += kTileRows;
    while (source_ < num_sources_) {
      const KeyWindow& window = sources_[source_].window;
      const int key_block = n_ + offset_;
      const int end_key = window.causal && offset_ == 0 ? first_query_ + 1 : block_;
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
  int num_sources_, num_blocks_, block_, n_, first_query_;
  int source_ = 0, offset_, first_key_ = -kTileRows;
};

// Iterates over the tiles of queries that see keys [first_key, first_key + kTileRows) of block m:
// those of each of the `group` query heads that read the keys' head. `window` must outlive it.
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

// ---- Tensor cores (PTX ISA, sections "Matrix Fragments for mma.m16n8k16" and "ldmatrix").

struct Place {
  int row, column;
};

// The place of number i of a lane in a 16 x 8 result. A 16 x 16 left operand consists of two such
// halves: numbers 0 to 3 of the left half, then those of the right half, two per register.
BIRKHOFF_HOST_DEVICE constexpr Place place_in_c(int lane, int i) {
  return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}

// The place to which a lane points ldmatrix.x4 for 16 x 16 numbers in shared memory: lane 8i + r
// points to row r of the i-th 8 x 8 matrix. The second matrix lies below the first (downwards) or
// to its right (rightwards).
BIRKHOFF_HOST_DEVICE constexpr Place downwards(int lane) { return {lane % 16, lane / 16 * 8}; }
BIRKHOFF_HOST_DEVICE constexpr Place rightwards(int lane) {
  return {lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8};
}

// Byte offset of a number in its tile. The groups of 8 numbers (16 bytes) of a row are permuted so
// that one group of 8 neighbouring rows covers all 32 banks.
template <int kColumns>
BIRKHOFF_HOST_DEVICE constexpr std::uint32_t place_in_tile(int row, int column) {
  static_assert(kColumns % 64 == 0);
  return static_cast<std::uint32_t>(2 *
                                    (row * kColumns + ((column / 8) ^ (row % 8)) * 8 + column % 8));
}

// `place` moved right by `columns`, in bytes. One register and exclusive ors with constants then
// give all places of a row. `columns` is a multiple of 8 whose bits are not set in the column of
// `place`; the address that `place` counts from is a multiple of 128.
BIRKHOFF_HOST_DEVICE constexpr std::uint32_t further_right(std::uint32_t place, int columns) {
  return (place ^ static_cast<std::uint32_t>(columns % 64 * 2)) +
         static_cast<std::uint32_t>(columns / 64 * 128);
}

}  // namespace birkhoff
