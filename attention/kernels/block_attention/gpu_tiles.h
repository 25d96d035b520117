// Index arithmetic of the kernels of attention in blocks: which tiles there are, and where tensor
// cores want their numbers. For g++ and nvcc alike: no LibTorch here.
#pragma once

#include <cstdint>

#include "attention/kernels/common/key_window.h"
#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// Queries or keys of a tile. Four warps of 16 rows each; blocks of 64 are the usual size.
constexpr int kTileRows = 64;

// What a kernel takes for head dims up to kHeadDim (64, 128 or 256), on host and device. A
// multiprocessor's blocks share 164 KiB (sm_80) or 228 KiB (sm_90), 1 KiB of which each of them
// loses; one may have 163 or 227 KiB.
template <int kHeadDim>
struct BlockAttentionShape {
  // Columns of a result that one warp keeps in registers; two warps share the rows of a wider one.
  static constexpr int kWarpColumns = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kWarpsOfRow = kHeadDim / kWarpColumns;
  static constexpr int kThreads = kWarpsOfRow * kTileRows / 16 * 32;
  // Tiles in flight: while one is worked on, the next comes.
  static constexpr int kForwardStages = 2;
  static constexpr int kBackwardStages = kHeadDim <= 128 ? 2 : 1;

  // Blocks of threads that a multiprocessor shall run at once: bounds their registers. More than
  // one only where the compiler then keeps no registers in memory.
  static constexpr int kForwardBlocks = kHeadDim == 64 ? 4 : 1;
  static constexpr int kQueriesBlocks = kHeadDim == 64 ? 3 : 1;
  static constexpr int kKeysBlocks = 1;

  // Bytes of a tile of rows, of one of probabilities, and of a number for each row.
  static constexpr int kRowsBytes = kTileRows * kHeadDim * 2;
  static constexpr int kPairsBytes = kTileRows * kTileRows * 2;
  static constexpr int kNumbersBytes = kTileRows * 4;

  // q; k and v of each stage; bias.
  static constexpr int kForwardBytes = (1 + 2 * kForwardStages) * kRowsBytes + kNumbersBytes;
  // q and d_out; k and v of each stage; p and d_s; bias, maximum, inverse sum, and delta in a
  // part for each warp of a row.
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

// Steps through the tiles of keys that queries [first_query, first_query + kTileRows) of block n
// see: source by source, offset by offset. Sources have a member `window`.
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

  // To the next tile, at first to the first one. False: there is none.
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

// Steps through the tiles of queries that see keys [first_key, first_key + kTileRows) of block m.
// `window` outlives it.
class QueryTiles {
 public:
  BIRKHOFF_HOST_DEVICE QueryTiles(const KeyWindow& window, int num_blocks, int block, int m,
                                  int first_key)
      : window_(window),
        num_blocks_(num_blocks),
        block_(block),
        m_(m),
        first_key_(first_key),
        offset_(window.first_offset),
        first_query_(first_of_offset() - kTileRows) {}

  BIRKHOFF_HOST_DEVICE bool next() {
    first_query_ += kTileRows;
    while (offset_ <= window_.last_offset) {
      if (n() >= 0 && n() < num_blocks_ && first_query_ < block_) return true;
      ++offset_;
      first_query_ = first_of_offset();
    }
    return false;
  }

  BIRKHOFF_HOST_DEVICE int n() const { return m_ - offset_; }
  BIRKHOFF_HOST_DEVICE int offset() const { return offset_; }
  BIRKHOFF_HOST_DEVICE int first_query() const { return first_query_; }

 private:
  BIRKHOFF_HOST_DEVICE int first_of_offset() const {
    return window_.causal && offset_ == 0 ? first_key_ : 0;
  }

  const KeyWindow& window_;
  int num_blocks_, block_, m_, first_key_, offset_, first_query_;
};

// ---- Tensor cores (PTX ISA, sections "Matrix Fragments for mma.m16n8k16" and "ldmatrix").

struct Place {
  int row, column;
};

// Where number i of a lane stands in a result of 16 x 8. Left operands of 16 x 16 are two such side
// by side: numbers 0 to 3 of the left one, then of the right one, two to a register.
BIRKHOFF_HOST_DEVICE constexpr Place place_in_c(int lane, int i) {
  return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}

// Where a lane points ldmatrix.x4 for 16 x 16 numbers in shared memory: lane 8i + r to row r of
// matrix i of 8 x 8. The second matrix lies below the first, or right of it.
BIRKHOFF_HOST_DEVICE constexpr Place downwards(int lane) { return {lane % 16, lane / 16 * 8}; }
BIRKHOFF_HOST_DEVICE constexpr Place rightwards(int lane) {
  return {lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8};
}

// Bytes from a tile's begin to a number of it. A row's groups of 8 numbers (16 bytes) are permuted
// so that one group of 8 neighbouring rows lies in all 32 banks.
template <int kColumns>
BIRKHOFF_HOST_DEVICE constexpr std::uint32_t place_in_tile(int row, int column) {
  static_assert(kColumns % 64 == 0);
  return static_cast<std::uint32_t>(2 *
                                    (row * kColumns + ((column / 8) ^ (row % 8)) * 8 + column % 8));
}

// The place `columns` further right, in bytes from where `place` is: one register for all places of
// a row, and exclusive ors with constants. `columns` is a multiple of 8 whose bits the column of
// `place` lacks; what `place` counts from is a multiple of 128.
BIRKHOFF_HOST_DEVICE constexpr std::uint32_t further_right(std::uint32_t place, int columns) {
  return (place ^ static_cast<std::uint32_t>(columns % 64 * 2)) +
         static_cast<std::uint32_t>(columns / 64 * 128);
}

}  // namespace birkhoff
