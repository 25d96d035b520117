// The common part of the GPU kernels of block mixing (gpu_products.h, gpu_few_blocks.h): sizes,
// tiles of weights, and the slabs and sets of columns that blocks of threads take.
#pragma once

#include <cstdint>

#include "attention/kernels/block_mix/gpu_params.h"
#include "attention/kernels/tile_attention/gpu_tiles.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// Numbers of blocks, threads and bytes, for host and device.
struct BlockMixShape {
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kSlab = 128;                    // columns of a block of threads
  static constexpr int kWarpColumns = kSlab / kWarps;  // of each of its warps
  static constexpr int kTile = kTileRows;              // rows and columns of other tiles
  static constexpr int kFewBlocks = 64;                // of gpu_few_blocks.h
  static constexpr int kTileBytes = 2 * kTile * kTile;

  BIRKHOFF_HOST_DEVICE static constexpr int tiles(int blocks) {
    return (blocks + kTile - 1) / kTile;
  }
  // The number of slabs of `width` columns.
  BIRKHOFF_HOST_DEVICE static int slabs(const BlockMixParams& p, int width) {
    return (p.block * p.head_dim + width - 1) / width;
  }
  // gpu_few_blocks.h: rows that hold so few blocks, and columns of a slab with that many rows.
  static constexpr int few_rows(int blocks) { return blocks <= 16 ? 16 : blocks <= 32 ? 32 : 64; }
  BIRKHOFF_HOST_DEVICE static constexpr int few_columns(int rows) { return 8192 / rows; }
  // The number of parts of the sum of d_w, which depends only on the shape. Each part costs a write
  // and a read of N x N numbers, so a part of many blocks has at least 32 of the kernel's steps.
  // More parts than fill an H100 gain nothing; it runs two blocks of threads of few blocks on a
  // multiprocessor.
  static int num_parts(const BlockMixParams& p) {
    const bool few = p.blocks <= kFewBlocks;
    const std::int64_t width = few ? few_columns(few_rows(p.blocks)) : kTile,
                       steps = std::int64_t{p.num_tensors} * slabs(p, static_cast<int>(width)),
                       tasks = std::int64_t{p.batch} * p.heads * tiles(p.blocks) * tiles(p.blocks),
                       most = few ? steps : steps / 32,
                       enough = tasks < 1 ? 1 : (few ? 256 : 512) / tasks;
    const std::int64_t parts = enough < most ? enough : most;
    return static_cast<int>(parts < 1 ? 1 : parts);
  }
};

// Steps through tiles of weights: for each tile of result rows, the tiles of source rows that it
// sums, at least one.
template <bool kTransposed>
class MixTiles {
 public:
  BIRKHOFF_HOST_DEVICE MixTiles(int blocks, int diagonal)
      : last_tile_((blocks - 1) / kTileRows), diagonal_(diagonal), source_(first_source() - 1) {}

  // Moves to the next tile; the first call moves to the first one. Returns false if there is none.
  BIRKHOFF_HOST_DEVICE bool next() {
    if (++source_ <= last_source()) return true;
    if (++result_ > last_tile_) return false;
    source_ = first_source();
    return true;
  }
  BIRKHOFF_HOST_DEVICE bool ends_result() const { return source_ == last_source(); }

  // The first rows of the result tile and of the source tile.
  BIRKHOFF_HOST_DEVICE int result() const { return result_ * kTileRows; }
  BIRKHOFF_HOST_DEVICE int source() const { return source_ * kTileRows; }

 private:
  // The tile of a row, or the nearest tile if the row does not exist.
  BIRKHOFF_HOST_DEVICE int tile_of(int row) const {
    const int tile = row < 0 ? 0 : row / kTileRows;
    return tile < last_tile_ ? tile : last_tile_;
  }
  BIRKHOFF_HOST_DEVICE int first_source() const {
    return kTransposed ? tile_of(result() - diagonal_) : 0;
  }
  BIRKHOFF_HOST_DEVICE int last_source() const {
    return kTransposed ? last_tile_ : tile_of(result() + kTileRows - 1 + diagonal_);
  }

  int last_tile_, diagonal_, result_ = 0, source_;
};

// Eight neighboring columns, all of one token.
struct MixColumns {
  std::uint16_t* data;  // of row 0
  int rows;             // 0 if these columns do not exist, or another set has them
};
// Slabs [first, end).
struct MixSlabs {
  int first, end;

  BIRKHOFF_HOST_DEVICE int count() const { return end - first; }
};
// The token's group of eight with index `group`.
struct MixGroup {
  int token, group;
};

// The common part of both kernels. `Thread` is GpuThread (cluster/base/gpu/gpu_thread.cuh) or its
// emulation.
template <typename Thread>
class BlockMixBody {
 public:
  static constexpr int kThreads = BlockMixShape::kThreads;

  BIRKHOFF_DEVICE BlockMixBody(const Thread& thread, const BlockMixParams& p)
      : thread_(thread), p_(p), lane_(thread.index() % 32), warp_(thread.index() / 32) {}

 protected:
  using Shape = BlockMixShape;

  Thread thread_;
  const BlockMixParams& p_;
  const int lane_, warp_;
  // Set by take().
  int set_ = 0, batch_ = 0, head_ = 0;
  int first_token_ = 0, end_token_ = 0;  // of a block: those of the set
  int sources_ = 0;                      // blocks that have them

  // The tokens of a block before which a sample's last block ends.
  BIRKHOFF_DEVICE int split_of(int batch) const {
    const int last = p_.lengths == nullptr ? 0 : static_cast<int>(p_.lengths[batch]) % p_.block;
    return last == 0 ? p_.block : last;
  }
  // The slabs of `width` columns that have columns of the set.
  BIRKHOFF_DEVICE MixSlabs slabs_of(int batch, int set, int width) const {
    const int all = p_.block * p_.head_dim, split = split_of(batch) * p_.head_dim;
    if (set == 0) return {0, (split + width - 1) / width};
    return {split / width, split == all ? split / width : (all + width - 1) / width};
  }
  BIRKHOFF_DEVICE void take(int batch, int head, int set) {
    const int split = split_of(batch);
    set_ = set;
    batch_ = batch;
    head_ = head;
    first_token_ = set == 0 ? 0 : split;
    end_token_ = set == 0 ? split : p_.block;
    sources_ = p_.blocks;
    if (p_.lengths == nullptr) return;
    const auto length = static_cast<int>(p_.lengths[batch]);
    sources_ = set == 0 ? (length + p_.block - 1) / p_.block : length / p_.block;
  }
  // The most tasks that a head's slabs make, with one for each set of a slab.
  BIRKHOFF_HOST_DEVICE static int slab_tasks(const BlockMixParams& p, int width) {
    return Shape::slabs(p, width) + p.sets() - 1;
  }
  // Takes one of these tasks. Returns its slab, or -1 if there is none.
  BIRKHOFF_DEVICE int take_slab(int batch, int head, int number, int width) {
    const MixSlabs first = slabs_of(batch, 0, width);
    take(batch, head, number < first.end ? 0 : 1);
    if (set_ == 0) return number;
    const MixSlabs second = slabs_of(batch, 1, width);
    const int slab = second.first + number - first.end;
    return slab < second.end ? slab : -1;
  }
  BIRKHOFF_DEVICE const std::uint16_t* weights() const {
    return p_.weights + set_ * p_.second_set + batch_ * p_.weight_strides[0] +
           head_ * p_.weight_strides[1];
  }
  BIRKHOFF_DEVICE float* d_weights(int part) const {
    return p_.d_weights +
           (((std::int64_t{set_} * p_.parts + part) * p_.batch + batch_) * p_.heads + head_) *
               p_.blocks * p_.blocks;
  }

  BIRKHOFF_DEVICE int groups_of_token() const { return p_.head_dim / 8; }
  BIRKHOFF_DEVICE MixGroup group_at(int number) const {
    return {number / groups_of_token(), number % groups_of_token()};
  }
  // The first num_rows rows of the columns, if they are of the set.
  BIRKHOFF_DEVICE MixColumns columns_of(const BlockRowsParams& rows, MixGroup at,
                                        int num_rows) const {
    if (at.token < first_token_ || at.token >= end_token_) return {rows.data, 0};
    return {rows.data + batch_ * rows.strides[0] + head_ * rows.strides[1] +
                at.token * rows.strides[3] + at.group * 8,
            num_rows};
  }

  // Whether any of the 16 x 16 weights from row u and column v on may be nonzero.
  BIRKHOFF_DEVICE bool has_weights(int u, int v) const {
    return u < p_.blocks && v < p_.blocks && v <= u + 15 + p_.diagonal;
  }
};

}  // namespace birkhoff
