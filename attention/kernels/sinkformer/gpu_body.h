// The common part of the kernels of doubly stochastic attention, on the tiles of
// tile_attention/gpu_body.h. A thread block owns a tile of rows of one side, queries or keys, and
// takes the tiles of the other side one after another. gpu_forward.h and gpu_backward.h describe
// what the kernels compute.
#pragma once

#include <cstdint>

#include "attention/kernels/sinkformer/gpu_params.h"
#include "attention/kernels/tile_attention/gpu_body.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// Of two adjacent columns.
struct alignas(8) TwoColumns {
  float of[2];
};

// A value of each of a lane's rows plus a value of each of its columns.
template <int kGroups>
struct LaneSums {
  float rows[2];
  TwoColumns columns[kGroups];

  // For element r of group j of LanePairs.
  BIRKHOFF_DEVICE float at(int j, int r) const { return rows[r / 2] + columns[j].of[r % 2]; }
};

template <typename Thread, int kHeadDim>
class SinkformerBody : protected TileBody<Thread, kHeadDim> {
  using Tile = TileBody<Thread, kHeadDim>;
  using Shape = GpuTileShape<kHeadDim>;
  static_assert(Shape::kWarpsOfRow == 1);

 public:
  static constexpr int kThreads = Shape::kThreads;

  // The number of thread blocks, which are numbered by tile, then head, then sequence.
  static std::int64_t num_tasks(const SinkformerParams& p) {
    return std::int64_t{p.batch} * p.heads * (p.side(p.step).padded() / kTileRows);
  }

  // 32 bits: a grid has fewer than 2^31 thread blocks.
  BIRKHOFF_DEVICE SinkformerBody(const Thread& thread, const SinkformerParams& p)
      : Tile(thread, 0), p_(p), own_(p.side(p.step)), other_(p.side(p.step + 1)) {
    const auto task = static_cast<unsigned>(thread.block()),
               tiles = static_cast<unsigned>(own_.padded() / kTileRows);
    const int head = static_cast<int>(task / tiles);
    head_ = {head / p.heads, head % p.heads};
    first_ = static_cast<int>(task % tiles) * kTileRows;
    own_length_ = length_of(own_);
    other_length_ = length_of(other_);
    const int rest = own_length_ - first_;
    num_rows_ = rest < kTileRows ? rest : kTileRows;
  }

 protected:
  using Tile::first_row_;
  using Tile::lane_;
  using Tile::thread_;
  using typename Tile::Columns;
  using typename Tile::OwnRows;

  // A stage holds two values of each row of a tile of the other side, its rows and, in most
  // kernels, its values.
  static constexpr int kRowsStageBytes = 2 * Shape::kNumbersBytes + Shape::kRowsBytes,
                       kStageBytes = kRowsStageBytes + Shape::kRowsBytes;
  static BIRKHOFF_DEVICE std::uint32_t numbers_of(std::uint32_t stage, int which) {
    return stage + which * Shape::kNumbersBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t rows_of(std::uint32_t stage) {
    return stage + 2 * Shape::kNumbersBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t values_of(std::uint32_t stage) {
    return stage + kRowsStageBytes;
  }

  const SinkformerParams& p_;
  const SinkformerSide &own_, &other_;
  GpuHead head_;
  int first_;                      // row of the own tile
  int num_rows_;                   // of the own tile that exist; 0 or less: none
  int own_length_, other_length_;  // n and m, or m and n

  // n / m or m / n: what a row of the own side sums to, where a row of the other sums to 1.
  BIRKHOFF_DEVICE float mass() const {
    return static_cast<float>(other_length_) / static_cast<float>(own_length_);
  }

  // ---- Vectors of the head.

  // The own potentials of half-step t, or of t - 1 if t is of the other side; null: 0.
  BIRKHOFF_DEVICE float* own_potentials(int t) const {
    return vector(own_, own_.potentials, is_own(t) ? t : t - 1, first_);
  }
  // The same of the other side, from row `first` on.
  BIRKHOFF_DEVICE float* other_potentials(int t, int first) const {
    return vector(other_, other_.potentials, is_own(t) ? t - 1 : t, first);
  }
  // The coefficients of half-step t; null if they are of the other side.
  BIRKHOFF_DEVICE float* own_coefficients(int t) const {
    return is_own(t) ? vector(own_, own_.coefficients, t, first_) : nullptr;
  }
  BIRKHOFF_DEVICE float* other_coefficients(int t, int first) const {
    return is_own(t) ? nullptr : vector(other_, other_.coefficients, t, first);
  }

  // Writes a value of each row of the own tile, 0 for rows that do not exist. The four lanes that
  // share a row have it.
  BIRKHOFF_DEVICE void store_values(float* to, const float (&x)[2]) const {
    if (lane_ % 4 != 0) return;
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + lane_ / 4 + 8 * half;
      to[row] = row < num_rows_ && other_length_ > 0 ? x[half] : 0;
    }
  }

  // Values of the lane's rows from `rows` on and of its columns from `columns` on; null: 0.
  template <int kGroups>
  BIRKHOFF_DEVICE LaneSums<kGroups> load_sums(const float* rows, const float* columns) const {
    LaneSums<kGroups> sums = {};
    if (rows != nullptr) {
      BIRKHOFF_UNROLL
      for (int half = 0; half < 2; ++half) {
        sums.rows[half] = rows[first_row_ + lane_ / 4 + 8 * half];
      }
    }
    if (columns != nullptr) {
      BIRKHOFF_UNROLL
      for (int j = 0; j < kGroups; ++j) {
        sums.columns[j] =
            *reinterpret_cast<const TwoColumns*>(columns + 8 * j + place_in_c(lane_, 0).column);
      }
    }
    return sums;
  }

  // ---- Tiles.

  // Rows of the own tile.
  BIRKHOFF_DEVICE void load_own(std::uint32_t to, const RowsParams& x) const {
    load(to, x, first_, num_rows_);
  }
  // Rows of the other side from row `first` on.
  BIRKHOFF_DEVICE void load_other(std::uint32_t to, const RowsParams& x, int first) const {
    load(to, x, first, other_length_ - first);
  }
  // A value of each row of a tile; null: 0.
  BIRKHOFF_DEVICE void load_numbers(std::uint32_t to, const float* from) const {
    const int row = thread_.index();
    if (row >= kTileRows) return;
    const bool exists = from != nullptr;
    thread_.template copy_async<4>(to + 4 * row, exists ? from + row : nullptr, exists);
  }
  // Stores factor * c to the warp's rows of x, by way of `tile`, where no other warp uses them.
  BIRKHOFF_DEVICE void store_own(const Columns& c, float factor, std::uint32_t tile,
                                 const RowsParams& x) const {
    this->store_rows(c, factor, tile, row_of<std::uint16_t>(x, head_, first_), x.strides[2],
                     num_rows_, p_.head_dim);
  }

  // For each tile of the other side: load(stage, first row), then work(stage, first row), while the
  // next tile loads. Two stages of kBytes lie at `stages`. Warps that own no row do not work.
  template <int kBytes, typename Load, typename Work>
  BIRKHOFF_DEVICE void visit_tiles(std::uint32_t stages, Load load, Work work) const {
    if (other_length_ > 0) load(stages, 0);
    thread_.commit();
    std::uint32_t stage = stages;
    for (int first = 0; first < other_length_; first += kTileRows) {
      const std::uint32_t next = stages + (stage == stages ? kBytes : 0);
      if (first + kTileRows < other_length_) load(next, first + kTileRows);
      thread_.commit();
      thread_.template wait<1>();
      thread_.sync();
      if (first_row_ < num_rows_) work(stage, first);
      thread_.sync();  // the tile has been read
      stage = next;
    }
    thread_.template wait<0>();
    thread_.sync();
  }

  // Turns products into logits times log2(e) plus the values of their columns at `numbers`;
  // -infinity for columns that do not exist. `first`: the row of the other side that is the first
  // column.
  template <int kGroups>
  BIRKHOFF_DEVICE void take_logits(LanePairs<kGroups>& s, std::uint32_t numbers, int first) const {
    const float factor = p_.scale * kLog2E;
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups; ++j) {
      const TwoColumns two = of_columns(numbers, j);
      BIRKHOFF_UNROLL
      for (int r = 0; r < 4; ++r) s[j][r] = s[j][r] * factor + two.of[r % 2];
    }
    hide(s, first);
  }
  // Without such values.
  template <int kGroups>
  BIRKHOFF_DEVICE void take_logits(LanePairs<kGroups>& s, int first) const {
    const float factor = p_.scale * kLog2E;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) s[i / 4][i % 4] *= factor;
    hide(s, first);
  }
  // The values at `numbers` of the lane's columns in group j.
  BIRKHOFF_DEVICE TwoColumns of_columns(std::uint32_t numbers, int j) const {
    return thread_.template load_shared<TwoColumns>(numbers +
                                                    4 * (8 * j + place_in_c(lane_, 0).column));
  }

 private:
  BIRKHOFF_DEVICE int length_of(const SinkformerSide& side) const {
    return side.lengths == nullptr ? side.size : static_cast<int>(side.lengths[head_.b]);
  }
  // Whether half-step t is of the own side.
  BIRKHOFF_DEVICE bool is_own(int t) const { return (t + p_.step) % 2 == 0; }
  // That of half-step t, from row `first` on; null if t is 0.
  BIRKHOFF_DEVICE float* vector(const SinkformerSide& side, float* vectors, int t,
                                int first) const {
    if (t == 0) return nullptr;
    const std::int64_t head = std::int64_t{head_.b} * p_.heads + head_.h;
    return vectors + (head * side.vectors + (t - 1) / 2) * side.padded() + first;
  }
  template <int kGroups>
  BIRKHOFF_DEVICE void hide(LanePairs<kGroups>& s, int first) const {
    const int count = other_length_ - first;
    if (count >= 8 * kGroups) return;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      if (8 * (i / 4) + place_in_c(lane_, i % 4).column >= count) s[i / 4][i % 4] = -kInfinity;
    }
  }
  BIRKHOFF_DEVICE void load(std::uint32_t to, const RowsParams& x, int first, int count) const {
    this->load_rows(to, row_of<const std::uint16_t>(x, head_, first), x.strides[2], count,
                    p_.head_dim);
  }
};

}  // namespace birkhoff
