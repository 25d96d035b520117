// Block mixing of at most 64 blocks: the formulas of gpu_products.h, with all rows of a head at
// once.
//
// A slab is 8,192 / kRows columns of one head and tensor, with all its rows (16 KiB); kRows is 16,
// 32 or 64, at least the number of blocks. Forward, a block of threads owns a slab of y: a warp
// owns a quarter of its columns. Backward, it owns a part of the slabs of all tensors of a head,
// one after the other, of which it computes d_x as forward and whose share of d_w it sums: d_y and
// x are read once for both gradients. A warp sums 16 rows of d_w; if there are fewer than 64 rows,
// 2 or 4 warps share these, each with its share of the columns, and their sums are added in their
// order.
//
// Shared memory: the weights (2 to 8 KiB) and a slab of x, which y overwrites; backward the slabs
// of d_y, x and the gradient from the other uses of x, which d_x overwrites, while the next three
// load (98 to 104 KiB in all). Pairs of 16 rows and 16 sources above the diagonal are skipped. No
// atomics: the same bits each time.
#pragma once

#include <cstdint>

#include "attention/kernels/block_mix/gpu_products.h"

namespace birkhoff {

template <typename Thread, bool kBackward, int kRows>
class BlockMixFew : public BlockMixBody<Thread> {
  using Body = BlockMixBody<Thread>;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using Body::warp_;
  using typename Body::Shape;

  static constexpr int kSlab = Shape::few_columns(kRows), kGroups = kSlab / 8,
                       kWarpColumns = kSlab / Shape::kWarps, kWarpGroups = kWarpColumns / 8,
                       kTiles = kRows / 16, kColumnWarps = Shape::kWarps / kTiles;
  static constexpr std::uint32_t kSlabBytes = 2 * kRows * kSlab;
  // After the weights, in each stage: the operands of results, backward x, and the results.
  static constexpr std::uint32_t kStages = 2 * kRows * Shape::kTile,
                                 kX = kBackward ? kSlabBytes : 0, kResults = 2 * kX,
                                 kStageBytes = kResults + kSlabBytes, kSums = kStages;

  // The warp's 16 rows of d_w, in groups of 8 columns.
  using Sums = float[2 * kTiles][4];

 public:
  static constexpr int kThreadBlocks = kBackward ? 2 : kRows == 64 ? 4 : 8;
  static constexpr int kSharedBytes = kStages + (kBackward ? 2 : 1) * kStageBytes;
  static_assert(4 * kRows * kRows * kColumnWarps <= 2 * kStageBytes || !kBackward);

  using Body::Body;

  // The number of blocks of threads.
  static std::int64_t num_tasks(const BlockMixParams& p) {
    const int parts = kBackward ? p.sets() * p.parts : p.num_tensors * Body::slab_tasks(p, kSlab);
    return std::int64_t{p.batch} * p.heads * parts;
  }

  // The order of the blocks of threads: by part of the slabs (forward by slab, then tensor;
  // backward by part, then set), then head and batch.
  BIRKHOFF_DEVICE void run() {
    const int tasks = Body::slab_tasks(p_, kSlab),
              parts = kBackward ? p_.sets() * p_.parts : p_.num_tensors * tasks;
    int task = static_cast<int>(thread_.block());
    int part = task % parts;
    task /= parts;
    const int head = task % p_.heads, batch = task / p_.heads;
    // A step is a slab of a tensor.
    MixSlabs slabs;
    int step, end;
    if constexpr (kBackward) {
      this->take(batch, head, part / p_.parts);
      part %= p_.parts;
      slabs = this->slabs_of(batch, this->set_, kSlab);
      const int steps = p_.num_tensors * slabs.count(),
                steps_of_part = (steps + p_.parts - 1) / p_.parts;
      step = part * steps_of_part;
      end = step + steps_of_part < steps ? step + steps_of_part : steps;
    } else {
      const int slab = this->take_slab(batch, head, part % tasks, kSlab);
      if (slab < 0) return;
      slabs = this->slabs_of(batch, this->set_, kSlab);
      step = part / tasks * slabs.count() + slab - slabs.first;
      end = step + 1;
    }
    const auto load_step = [&](int number, std::uint32_t stage) {
      load(number / slabs.count(), slabs.first + number % slabs.count(), stage);
    };

    load_weights();
    if (step < end) load_step(step, kStages);
    thread_.commit();
    Sums d_w = {};
    for (std::uint32_t stage = kStages; step < end; ++step) {
      const std::uint32_t other = kStages + kStageBytes - (stage - kStages);
      if (kBackward && step + 1 < end) load_step(step + 1, other);
      thread_.commit();
      thread_.template wait<1>();
      thread_.sync();
      const int tensor = step / slabs.count();
      if constexpr (kBackward) add_up(d_w, stage);
      multiply(stage, kBackward && p_.others[tensor].data != nullptr);
      thread_.sync_warp();
      store((kBackward ? p_.d_x : p_.y)[tensor], slabs.first + step % slabs.count(), stage);
      if constexpr (kBackward) {
        thread_.sync();  // the stage has been read
        stage = other;
      }
    }
    thread_.template wait<0>();
    if constexpr (kBackward) store_sums(d_w, part);
  }

 private:
  BIRKHOFF_DEVICE void load_weights() const {
    constexpr int kRowGroups = kRows / 8;
    const std::uint16_t* from = this->weights();
    for (int i = thread_.index(); i < kRows * kRowGroups; i += Shape::kThreads) {
      const int u = i / kRowGroups, v = i % kRowGroups * 8;
      thread_.template copy_async<16>(place_in_tile<Shape::kTile>(u, v),
                                      from + u * p_.weight_strides[2] + v,
                                      u < p_.blocks && v < p_.blocks);
    }
  }

  BIRKHOFF_DEVICE void load(int tensor, int slab, std::uint32_t stage) const {
    const MixGroup at = this->group_at(slab * kGroups + thread_.index() % kGroups);
    load_slab(stage + kX, p_.x[tensor], at, this->sources_);
    if constexpr (kBackward) {
      load_slab(stage, p_.d_y[tensor], at, p_.blocks);
      if (p_.others[tensor].data != nullptr) {
        load_slab(stage + kResults, p_.others[tensor], at, p_.blocks);
      }
    }
  }
  // Appends zeros after the last row.
  BIRKHOFF_DEVICE void load_slab(std::uint32_t to, const BlockRowsParams& rows, MixGroup at,
                                 int num_rows) const {
    constexpr int kRowsAtOnce = Shape::kThreads / kGroups;
    const int group = thread_.index() % kGroups, first = thread_.index() / kGroups;
    const MixColumns columns = this->columns_of(rows, at, num_rows);
    const std::uint16_t* from = columns.data + first * rows.strides[2];
    BIRKHOFF_UNROLL
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      thread_.template copy_async<16>(to + place_in_tile<kSlab>(first + i, 8 * group), from,
                                      first + i < columns.rows);
      from += kRowsAtOnce * rows.strides[2];
    }
  }

  // The warp's columns of y or d_x, 16 at a time. Forward they overwrite x.
  BIRKHOFF_DEVICE void multiply(std::uint32_t stage, bool adds) const {
    const Place down = downwards(lane_), right = rightwards(lane_), own = place_in_c(lane_, 0);
    const Place of_weights = kBackward ? right : down;
    const std::uint32_t weights = place_in_tile<Shape::kTile>(of_weights.row, of_weights.column);
    const int column = warp_ * kWarpColumns;
    const std::uint32_t operand = stage + place_in_tile<kSlab>(down.row, column + down.column);
    const std::uint32_t results =
        stage + kResults + place_in_tile<kSlab>(own.row, column + own.column);
    BIRKHOFF_UNROLL_BY(1)
    for (int f = 0; f < kWarpColumns; f += 16) {
      float c[kTiles][2][4] = {};
      BIRKHOFF_UNROLL
      for (int i = 0; adds && i < 4 * kTiles; ++i) {
        const std::uint32_t pair = thread_.template load_shared<std::uint32_t>(
            further_right(results, f + i % 2 * 8) + 2 * 8 * (i / 2) * kSlab);
        float* const to = &c[i / 4][i % 2][i / 2 % 2 * 2];
        to[0] = thread_.unpack(static_cast<std::uint16_t>(pair));
        to[1] = thread_.unpack(static_cast<std::uint16_t>(pair >> 16));
      }
      BIRKHOFF_UNROLL
      for (int k = 0; k < kRows; k += 16) {
        if (k >= p_.blocks) continue;
        std::uint32_t b[4];
        thread_.template load_matrices<true>(b, further_right(operand, f) + 2 * k * kSlab);
        BIRKHOFF_UNROLL
        for (int i = 0; i < kRows; i += 16) {
          const int u = kBackward ? k : i, v = kBackward ? i : k;
          if (!this->has_weights(u, v)) continue;
          std::uint32_t a[4];
          thread_.template load_matrices<kBackward>(
              a, further_right(weights, v) + 2 * u * Shape::kTile);
          thread_.multiply(c[i / 16][0], a, b[0], b[1]);
          thread_.multiply(c[i / 16][1], a, b[2], b[3]);
        }
      }
      if constexpr (!kBackward) thread_.sync_warp();  // all lanes have read what they overwrite
      BIRKHOFF_UNROLL
      for (int i = 0; i < 4 * kTiles; ++i) {
        const float* const from = &c[i / 4][i % 2][i / 2 % 2 * 2];
        thread_.store_shared(further_right(results, f + i % 2 * 8) + 2 * 8 * (i / 2) * kSlab,
                             thread_.pack(from[0], from[1]));
      }
    }
  }

  // Adds the slab's share to the warp's rows of d_w.
  BIRKHOFF_DEVICE void add_up(Sums& sums, std::uint32_t stage) const {
    constexpr int kColumns = kSlab / kColumnWarps;
    const Place down = downwards(lane_), right = rightwards(lane_);
    const int u = warp_ / kColumnWarps * 16, first = warp_ % kColumnWarps * kColumns;
    if (u >= p_.blocks) return;
    const std::uint32_t d_y = stage + place_in_tile<kSlab>(u + down.row, first + down.column);
    const std::uint32_t x = stage + kX + place_in_tile<kSlab>(right.row, first + right.column);
    BIRKHOFF_UNROLL_BY(2)
    for (int f = 0; f < kColumns; f += 16) {
      std::uint32_t a[4];
      thread_.template load_matrices<false>(a, further_right(d_y, f));
      BIRKHOFF_UNROLL
      for (int v = 0; v < kRows; v += 16) {
        if (!this->has_weights(u, v)) continue;
        std::uint32_t b[4];
        thread_.template load_matrices<false>(b, further_right(x, f) + 2 * v * kSlab);
        thread_.multiply(sums[v / 8], a, b[0], b[1]);
        thread_.multiply(sums[v / 8 + 1], a, b[2], b[3]);
      }
    }
  }

  // Writes the warp's columns of the slab of results.
  BIRKHOFF_DEVICE void store(const BlockRowsParams& rows, int slab, std::uint32_t stage) const {
    constexpr int kRowsAtOnce = 32 / kWarpGroups;
    const int group = warp_ * kWarpGroups + lane_ % kWarpGroups, first = lane_ / kWarpGroups;
    const MixColumns to = this->columns_of(rows, this->group_at(slab * kGroups + group), p_.blocks);
    BIRKHOFF_UNROLL_BY(4)
    for (int row = first; row < to.rows; row += kRowsAtOnce) {
      *reinterpret_cast<Words*>(to.data + row * rows.strides[2]) =
          thread_.template load_shared<Words>(stage + kResults +
                                              place_in_tile<kSlab>(row, 8 * group));
    }
  }

  // Adds up the sums of the warps that share rows, where the slabs were, and writes this part of
  // d_w.
  BIRKHOFF_DEVICE void store_sums(const Sums& sums, int part) const {
    thread_.sync();
    const int u = warp_ / kColumnWarps * 16;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 8 * kTiles; ++i) {
      const Place place = place_in_c(lane_, i % 4);
      thread_.store_shared(sum_at(warp_ % kColumnWarps, u + place.row, i / 4 * 8 + place.column),
                           sums[i / 4][i % 4]);
    }
    thread_.sync();
    const int N = p_.blocks;
    float* to = this->d_weights(part);
    for (int i = thread_.index(); i < N * N; i += Shape::kThreads) {
      const int row = i / N, v = i % N;
      float sum = 0;
      BIRKHOFF_UNROLL
      for (int share = 0; share < kColumnWarps; ++share) {
        sum += thread_.template load_shared<float>(sum_at(share, row, v));
      }
      to[i] = v <= row + p_.diagonal ? sum : 0.0f;
    }
  }
  static BIRKHOFF_DEVICE std::uint32_t sum_at(int share, int u, int v) {
    return kSums + static_cast<std::uint32_t>(4 * ((share * kRows + u) * kRows + v));
  }
};

// Calls run.operator()<Kernel>(bytes of shared memory) for each kernel of a pass, to launch it or
// to emulate it on the CPU.
template <typename Thread, bool kBackward, typename Run>
void for_each_mix_kernel(const BlockMixParams& p, const Run& run) {
  if (p.blocks <= BlockMixShape::kFewBlocks) {
    const auto run_few = [&]<int kRows>() {
      using Few = BlockMixFew<Thread, kBackward, kRows>;
      run.template operator()<Few>(Few::kSharedBytes);
    };
    const int rows = BlockMixShape::few_rows(p.blocks);
    if (rows == 16) return run_few.template operator()<16>();
    if (rows == 32) return run_few.template operator()<32>();
    return run_few.template operator()<64>();
  }
  using Rows = BlockMixRows<Thread, kBackward>;
  run.template operator()<Rows>(Rows::shared_bytes(p.blocks));
  if constexpr (kBackward) {
    using Weights = BlockMixWeights<Thread>;
    run.template operator()<Weights>(Weights::kSharedBytes);
  }
}

}  // namespace birkhoff
