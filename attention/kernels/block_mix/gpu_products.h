// Block mixing on the tensor cores of a GPU. Legend: u, v blocks of one head; f columns: the b D
// elements of a block's row, tokens side by side.
//
//   y_uf = sum_v w_uv x_vf,  d_x_vf = other_vf + sum_u w_uv d_y_uf,  d_w_uv = sum_f d_y_uf x_vf,
//
// where v <= u + diagonal. other_vf, which may be missing, is the gradient from the other uses of
// x. With padding the columns of tokens that a sample's last block lacks have weights of their own
// (MixPadding, block_mix.h): a block of threads takes the columns of one of the two sets, so the
// slab with columns of both is taken twice, and rows of padding are zeros that it does not read.
//
// BlockMixRows computes y or, with kTransposed, d_x. A block of threads owns a slab of 128 columns
// of all rows of one head; a warp owns 32 of these columns, 64 sums per thread at a time. For at
// most kFewBlocks blocks gpu_few_blocks.h replaces both kernels. Shared memory: the slab, which is
// read once (256 bytes per row), and two tiles of 64 x 64 weights (16 KiB), of which one comes from
// the L2 cache while the other is multiplied. Results are written through a tile that is no longer
// needed.
//
// BlockMixWeights computes d_w. A block of threads owns a 64 x 64 tile of d_w and a part of the
// columns of all tensors; a warp owns 16 rows. d_y and x come in 64 x 64 tiles, the next while one
// is multiplied (32 KiB). d_w is 0 above the diagonal.
//
// Tiles of weights that lie wholly above the diagonal are skipped, and so are such 16 x 16 products
// inside a tile. Products are of 16-bit elements with fp32 sums; y and d_x are rounded once, d_w is
// not. Each element has one owner, which adds in a fixed order: no atomics, the same bits each
// time.
#pragma once

#include <cstdint>

#include "attention/kernels/block_mix/gpu_body.h"

namespace birkhoff {

template <typename Thread, bool kTransposed>
class BlockMixRows : public BlockMixBody<Thread> {
  using Body = BlockMixBody<Thread>;
  using typename Body::Shape;
  using Tiles = MixTiles<kTransposed>;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using Body::warp_;

  static constexpr int kSlab = Shape::kSlab, kTile = Shape::kTile,
                       kWarpGroups = Shape::kWarpColumns / 8;
  static constexpr std::uint32_t kRows = 2 * Shape::kTileBytes;  // after two tiles of weights

  // The warp's columns of a tile of result rows: 16 rows at a time, in groups of 8 columns.
  using Sums = float[kTile / 16][kWarpGroups][4];

 public:
  static constexpr int kThreadBlocks = 1;

  using Body::Body;

  // The number of blocks of threads.
  static std::int64_t num_tasks(const BlockMixParams& p) {
    return p.num_tensors * std::int64_t{p.batch} * p.heads * Body::slab_tasks(p, kSlab);
  }
  static constexpr int shared_bytes(int blocks) {
    return 2 * Shape::kTileBytes + (blocks + 15) / 16 * 16 * kSlab * 2;
  }
  static_assert(shared_bytes(BlockMixParams::kMaxBlocks) <= 163 * 1024);  // sm_80

  // The order of the blocks of threads: by slab, then head, batch and tensor.
  BIRKHOFF_DEVICE void run() {
    const int slabs = Body::slab_tasks(p_, kSlab);
    int task = static_cast<int>(thread_.block());
    const int number = task % slabs;
    task /= slabs;
    const int head = task % p_.heads;
    task /= p_.heads;
    const int batch = task % p_.batch, tensor = task / p_.batch;
    const int slab = this->take_slab(batch, head, number, kSlab);
    if (slab < 0) return;
    const int first_group = slab * (kSlab / 8);

    load_slab(this->columns_of((kTransposed ? p_.d_y : p_.x)[tensor],
                               this->group_at(first_group + thread_.index() % (kSlab / 8)),
                               kTransposed ? p_.blocks : this->sources_),
              (kTransposed ? p_.d_y : p_.x)[tensor].strides[2]);
    const std::uint16_t* weights = this->weights();
    const BlockRowsParams& to = (kTransposed ? p_.d_x : p_.y)[tensor];
    const MixColumns results = this->columns_of(
        to, this->group_at(first_group + warp_ * kWarpGroups + lane_ / 8), p_.blocks);

    Tiles tiles(p_.blocks, p_.diagonal);
    bool more = tiles.next();
    load_weights(weights, tiles, 0);
    thread_.commit();
    const auto start = [&](Sums& sums) {
      if constexpr (kTransposed) {
        load_sums(sums, p_.others[tensor], first_group, tiles.result());
      }
    };
    Sums c = {};
    start(c);
    for (int stage = 0; more; stage ^= 1) {
      const Tiles now = tiles;
      more = tiles.next();
      if (more) load_weights(weights, tiles, stage ^ 1);
      thread_.commit();
      thread_.template wait<1>();
      thread_.sync();
      multiply(c, now, stage);
      thread_.sync();  // the tile has been read
      if (!now.ends_result()) continue;
      store(c, now.result(), stage, results, to.strides[2]);
      if (more) start(c);
      thread_.sync();  // before the tile after next overwrites where results went through
    }
    thread_.template wait<0>();
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t weights_tile(int stage) {
    return static_cast<std::uint32_t>(stage * Shape::kTileBytes);
  }

  // Initializes the sums of the tile of rows from `first_row` on with `rows`, if there are any.
  BIRKHOFF_DEVICE void load_sums(Sums& c, const BlockRowsParams& rows, int first_group,
                                 int first_row) const {
    if (rows.data == nullptr) return;
    const Place own = place_in_c(lane_, 0);
    BIRKHOFF_UNROLL
    for (int j = 0; j < kWarpGroups; ++j) {
      const MixColumns from =
          this->columns_of(rows, this->group_at(first_group + warp_ * kWarpGroups + j), p_.blocks);
      BIRKHOFF_UNROLL
      for (int i = 0; i < kTile / 8; ++i) {
        const int row = first_row + 8 * i + own.row;
        std::uint32_t pair = 0;
        if (row < from.rows) {
          pair = *reinterpret_cast<const std::uint32_t*>(from.data + row * rows.strides[2] +
                                                         own.column);
        }
        c[i / 2][j][i % 2 * 2] = thread_.unpack(static_cast<std::uint16_t>(pair));
        c[i / 2][j][i % 2 * 2 + 1] = thread_.unpack(static_cast<std::uint16_t>(pair >> 16));
      }
    }
  }

  // Appends zeros after the last row, up to a multiple of 16 rows.
  BIRKHOFF_DEVICE void load_slab(const MixColumns& columns, std::int64_t stride) const {
    constexpr int kGroups = kSlab / 8, kRowsAtOnce = Shape::kThreads / kGroups;
    static_assert(kRowsAtOnce % 8 == 0);
    const int row = thread_.index() / kGroups;
    const std::uint16_t* from = columns.data + row * stride;
    std::uint32_t to = kRows + place_in_tile<kSlab>(row, thread_.index() % kGroups * 8);
    BIRKHOFF_UNROLL_BY(4)
    for (int first = 0; first < p_.blocks; first += 16) {
      BIRKHOFF_UNROLL
      for (int i = 0; i < 16; i += kRowsAtOnce) {
        thread_.template copy_async<16>(to, from, first + i + row < columns.rows);
        from += kRowsAtOnce * stride;
        to += 2 * kRowsAtOnce * kSlab;
      }
    }
  }

  // The rows of a tile are destinations, its columns sources.
  BIRKHOFF_DEVICE void load_weights(const std::uint16_t* weights, const Tiles& tiles,
                                    int stage) const {
    constexpr int kGroups = kTile / 8, kRowsAtOnce = Shape::kThreads / kGroups;
    static_assert(kRowsAtOnce % 8 == 0);
    const int u = (kTransposed ? tiles.source() : tiles.result()) + thread_.index() / kGroups;
    const int v = (kTransposed ? tiles.result() : tiles.source()) + thread_.index() % kGroups * 8;
    const std::uint16_t* from = weights + u * p_.weight_strides[2] + v;
    std::uint32_t to = weights_tile(stage) + place_in_tile<kTile>(thread_.index() / kGroups,
                                                                  thread_.index() % kGroups * 8);
    BIRKHOFF_UNROLL
    for (int i = 0; i < kTile; i += kRowsAtOnce) {
      thread_.template copy_async<16>(to, from, u + i < p_.blocks && v < p_.blocks);
      from += kRowsAtOnce * p_.weight_strides[2];
      to += 2 * kRowsAtOnce * kTile;
    }
  }

  BIRKHOFF_DEVICE void multiply(Sums& c, const Tiles& tiles, int stage) const {
    const Place down = downwards(lane_), right = rightwards(lane_);
    const Place of_weights = kTransposed ? right : down;
    const std::uint32_t w =
        weights_tile(stage) + place_in_tile<kTile>(of_weights.row, of_weights.column);
    const std::uint32_t x =
        kRows + place_in_tile<kSlab>(down.row, warp_ * Shape::kWarpColumns + down.column) +
        static_cast<std::uint32_t>(2 * tiles.source() * kSlab);
    BIRKHOFF_UNROLL
    for (int k = 0; k < kTile; k += 16) {
      const int source = tiles.source() + k;
      if (source >= p_.blocks) continue;
      std::uint32_t b[kWarpGroups / 2][4];
      BIRKHOFF_UNROLL
      for (int j = 0; j < kWarpGroups / 2; ++j) {
        thread_.template load_matrices<true>(b[j], further_right(x, 16 * j) + 2 * k * kSlab);
      }
      BIRKHOFF_UNROLL
      for (int i = 0; i < kTile; i += 16) {
        const int result = tiles.result() + i;
        if (kTransposed ? !this->has_weights(source, result) : !this->has_weights(result, source)) {
          continue;
        }
        std::uint32_t a[4];
        const int row = kTransposed ? k : i, column = kTransposed ? i : k;
        thread_.template load_matrices<kTransposed>(a, further_right(w, column) + 2 * row * kTile);
        BIRKHOFF_UNROLL
        for (int j = 0; j < kWarpGroups; ++j) {
          thread_.multiply(c[i / 16][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  // Writes the sums and resets them to 0, 16 rows at a time, through the halves of the warp's
  // quarter of a tile: 16 rows of 64 columns. A lane writes columns `to` of every eighth row.
  BIRKHOFF_DEVICE void store(Sums& c, int first_row, int stage, const MixColumns& to,
                             std::int64_t stride) const {
    const std::uint32_t area =
        weights_tile(stage) + static_cast<std::uint32_t>(warp_ * (Shape::kTileBytes / 4));
    const Place own = place_in_c(lane_, 0);
    BIRKHOFF_UNROLL
    for (int i = 0; i < kTile / 16; ++i) {
      const int half = i % 2 * Shape::kWarpColumns;
      const std::uint32_t place = area + place_in_tile<kTile>(own.row, own.column);
      BIRKHOFF_UNROLL
      for (int j = 0; j < kWarpGroups; ++j) {
        const std::uint32_t place_j = further_right(place, half + 8 * j);
        thread_.store_shared(place_j, thread_.pack(c[i][j][0], c[i][j][1]));
        thread_.store_shared(place_j + 2 * 8 * kTile, thread_.pack(c[i][j][2], c[i][j][3]));
        BIRKHOFF_UNROLL
        for (int r = 0; r < 4; ++r) c[i][j][r] = 0;
      }
      thread_.sync_warp();
      BIRKHOFF_UNROLL
      for (int below = 0; below < 16; below += 8) {
        const int row = first_row + 16 * i + below + lane_ % 8;
        if (row >= to.rows) continue;
        *reinterpret_cast<Words*>(to.data + row * stride) = thread_.template load_shared<Words>(
            area + place_in_tile<kTile>(below + lane_ % 8, half + lane_ / 8 * 8));
      }
    }
  }
};

template <typename Thread>
class BlockMixWeights : public BlockMixBody<Thread> {
  using Body = BlockMixBody<Thread>;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using Body::warp_;
  using typename Body::Shape;

  static constexpr int kTile = Shape::kTile, kGroups = kTile / 8;
  // The sums of the warp's 16 rows.
  using Sums = float[kTile / 8][4];

 public:
  static constexpr int kThreadBlocks = 1;
  static constexpr int kSharedBytes = 4 * Shape::kTileBytes;

  using Body::Body;

  // The number of blocks of threads.
  static std::int64_t num_tasks(const BlockMixParams& p) {
    return std::int64_t{p.batch} * p.heads * p.sets() * p.parts * Shape::tiles(p.blocks) *
           Shape::tiles(p.blocks);
  }

  // The order of the blocks of threads: by tile of d_w, then part of the columns, set, head and
  // batch.
  BIRKHOFF_DEVICE void run() {
    const int tiles = Shape::tiles(p_.blocks);
    int task = static_cast<int>(thread_.block());
    const int first_v = task % tiles * kTile;
    task /= tiles;
    const int first_u = task % tiles * kTile;
    task /= tiles;
    const int part = task % p_.parts;
    task /= p_.parts;
    const int set = task % p_.sets();
    task /= p_.sets();
    this->take(task / p_.heads, task % p_.heads, set);

    Sums c = {};
    if (first_v <= first_u + kTile - 1 + p_.diagonal) add_up(c, part, first_u, first_v);
    store(c, part, first_u, first_v);
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t tile(int stage, int operand) {
    return static_cast<std::uint32_t>((2 * stage + operand) * Shape::kTileBytes);
  }

  BIRKHOFF_DEVICE void add_up(Sums& c, int part, int first_u, int first_v) const {
    const MixSlabs slabs = this->slabs_of(this->batch_, this->set_, kTile);
    const int steps = p_.num_tensors * slabs.count(),
              steps_of_part = (steps + p_.parts - 1) / p_.parts;
    int step = part * steps_of_part;
    const int end = step + steps_of_part < steps ? step + steps_of_part : steps;
    if (step >= end) return;
    // Of the next step. They advance step by step, which avoids divisions.
    int tensor = step / slabs.count(), slab = slabs.first + step % slabs.count();
    MixGroup at = this->group_at(slab * kGroups + thread_.index() % kGroups);
    const MixGroup further = this->group_at(kGroups);
    const auto load = [&](int stage) {
      load_rows(tile(stage, 0), p_.d_y[tensor], at, first_u, p_.blocks);
      load_rows(tile(stage, 1), p_.x[tensor], at, first_v, this->sources_);
      at = {at.token + further.token, at.group + further.group};
      if (at.group >= this->groups_of_token())
        at = {at.token + 1, at.group - this->groups_of_token()};
      if (++slab < slabs.end) return;
      ++tensor;
      slab = slabs.first;
      at = this->group_at(slab * kGroups + thread_.index() % kGroups);
    };
    load(0);
    thread_.commit();
    for (int stage = 0; step < end; stage ^= 1) {
      if (++step < end) load(stage ^ 1);
      thread_.commit();
      thread_.template wait<1>();
      thread_.sync();
      const int u = first_u + 16 * warp_;
      if (this->has_weights(u, first_v)) multiply(c, stage);
      thread_.sync();  // the tiles have been read
    }
    thread_.template wait<0>();
  }

  BIRKHOFF_DEVICE void load_rows(std::uint32_t to, const BlockRowsParams& rows, MixGroup at,
                                 int first, int num_rows) const {
    constexpr int kRowsAtOnce = Shape::kThreads / kGroups;
    static_assert(kRowsAtOnce % 8 == 0);
    const MixColumns columns = this->columns_of(rows, at, num_rows);
    const int row = thread_.index() / kGroups;
    const std::uint16_t* from = columns.data + (first + row) * rows.strides[2];
    to += place_in_tile<kTile>(row, thread_.index() % kGroups * 8);
    BIRKHOFF_UNROLL
    for (int i = 0; i < kTile; i += kRowsAtOnce) {
      thread_.template copy_async<16>(to, from, first + row + i < columns.rows);
      from += kRowsAtOnce * rows.strides[2];
      to += 2 * kRowsAtOnce * kTile;
    }
  }

  BIRKHOFF_DEVICE void multiply(Sums& c, int stage) const {
    const Place down = downwards(lane_), right = rightwards(lane_);
    const std::uint32_t d_y =
        tile(stage, 0) + place_in_tile<kTile>(16 * warp_ + down.row, down.column);
    const std::uint32_t x = tile(stage, 1) + place_in_tile<kTile>(right.row, right.column);
    BIRKHOFF_UNROLL
    for (int f = 0; f < kTile; f += 16) {
      std::uint32_t a[4];
      thread_.template load_matrices<false>(a, further_right(d_y, f));
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTile / 8; j += 2) {
        std::uint32_t b[4];
        thread_.template load_matrices<false>(b, further_right(x, f) + 2 * 8 * j * kTile);
        thread_.multiply(c[j], a, b[0], b[1]);
        thread_.multiply(c[j + 1], a, b[2], b[3]);
      }
    }
  }

  BIRKHOFF_DEVICE void store(const Sums& c, int part, int first_u, int first_v) const {
    const std::int64_t N = p_.blocks;
    float* to = this->d_weights(part);
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * (kTile / 8); ++i) {
      const Place place = place_in_c(lane_, i % 4);
      const int u = first_u + 16 * warp_ + place.row, v = first_v + i / 4 * 8 + place.column;
      if (u < N && v < N) to[u * N + v] = v <= u + p_.diagonal ? c[i / 4][i % 4] : 0.0f;
    }
  }
};

}  // namespace birkhoff
