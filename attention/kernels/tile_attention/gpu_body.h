// A thread's share of tiles in shared memory, of their products on tensor cores and of the softmax:
// the common part of the kernels of block attention and of attention over gathered rows.
//
// `Thread` is GpuThread (cluster/base/gpu/gpu_thread.cuh), or its emulation on the CPU. A tile is
// kTileRows rows of kHeadDim 16-bit elements; rows that do not exist, and columns from the head dim
// on, are zeros. A warp owns 16 rows of one tile and kWarpColumns columns of a result.
#pragma once

#include <cstdint>
#include <limits>

#include "attention/kernels/tile_attention/gpu_tiles.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

template <typename Thread, int kHeadDim>
class TileBody {
  using Shape = GpuTileShape<kHeadDim>;

 protected:
  // `warps_before`: warps of the thread's row that own columns before its own.
  BIRKHOFF_DEVICE TileBody(const Thread& thread, int warps_before)
      : thread_(thread),
        lane_(thread.index() % 32),
        first_row_(thread.index() / 32 % (kTileRows / 16) * 16),
        first_column_(warps_before * Shape::kWarpColumns) {}

  // A lane's elements in its warp's 16 rows, for each 8 columns; place_in_c() says which. In Pairs,
  // the columns are 8 kGroups rows of another tile; in Columns, they are the columns of a result.
  template <int kGroups>
  using Pairs = float[kGroups][4];
  using Columns = float[Shape::kWarpColumns / 8][4];

  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static constexpr std::uint32_t kAll = 0xffffffff;

  Thread thread_;
  const int lane_, first_row_, first_column_;  // the warp's

  // c_ij += sum_d a_id b_jd for the warp's rows i of tile a and rows [first_j, first_j + 8 kGroups)
  // of tile b.
  template <int kGroups>
  BIRKHOFF_DEVICE void multiply_rows(Pairs<kGroups>& c, std::uint32_t a_tile, std::uint32_t b_tile,
                                     int first_j) const {
    const Place down = downwards(lane_), right = rightwards(lane_);
    a_tile += place_in_tile<kHeadDim>(first_row_ + down.row, down.column);
    b_tile += place_in_tile<kHeadDim>(first_j + right.row, right.column);
    BIRKHOFF_UNROLL
    for (int d = 0; d < kHeadDim; d += 16) {
      std::uint32_t a[4];
      thread_.template load_matrices<false>(a, further_right(a_tile, d));
      BIRKHOFF_UNROLL
      for (int j = 0; j < kGroups; j += 2) {
        std::uint32_t b[4];
        thread_.template load_matrices<false>(b, further_right(b_tile, d) + 2 * 8 * j * kHeadDim);
        thread_.multiply(c[j], a, b[0], b[1]);
        thread_.multiply(c[j + 1], a, b[2], b[3]);
      }
    }
  }

  // c_id += sum_j a_ij x_jd over 16 rows j of tile x, for the warp's columns d.
  BIRKHOFF_DEVICE void multiply_columns(Columns& c, const std::uint32_t (&a)[4],
                                        std::uint32_t x_tile, int first_j) const {
    const Place down = downwards(lane_);
    x_tile += place_in_tile<kHeadDim>(down.row, first_column_ + down.column);
    BIRKHOFF_UNROLL
    for (int d = 0; d < Shape::kWarpColumns; d += 16) {
      std::uint32_t b[4];
      thread_.template load_matrices<true>(b, further_right(x_tile, d) + 2 * first_j * kHeadDim);
      thread_.multiply(c[d / 8], a, b[0], b[1]);
      thread_.multiply(c[d / 8 + 1], a, b[2], b[3]);
    }
  }
  // The same over rows [first_j, first_j + 8 kGroups) of x, with `a` rounded. A lane holds the same
  // elements of a left operand as of two adjacent results.
  template <int kGroups>
  BIRKHOFF_DEVICE void multiply_columns(Columns& c, const Pairs<kGroups>& a, std::uint32_t x_tile,
                                        int first_j) const {
    x_tile += 2 * first_j * kHeadDim;
    std::uint32_t operands[kGroups / 2][4];
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups / 2; ++j) {
      BIRKHOFF_UNROLL
      for (int r = 0; r < 4; ++r) {
        const float* pair = &a[2 * j + r / 2][r % 2 * 2];
        operands[j][r] = thread_.pack(pair[0], pair[1]);
      }
    }
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups / 2; ++j) multiply_columns(c, operands[j], x_tile, 16 * j);
  }

  // Turns logits into exp(s - maximum), with the maximum over all keys so far, and rescales the
  // earlier sums to the new maximum. `sum` covers only this lane's columns.
  BIRKHOFF_DEVICE void take_softmax(Pairs<kTileRows / 8>& s, float (&maximum)[2], float (&sum)[2],
                                    Columns& out) const {
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      float largest = maximum[half];
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        largest = fmaxf(largest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
      }
      largest = fmaxf(largest, thread_.exchange(largest, 1));
      largest = fmaxf(largest, thread_.exchange(largest, 2));
      const float shift = largest == -kInfinity ? 0 : largest;
      const float correction = thread_.exp2(maximum[half] - shift);
      maximum[half] = largest;
      float total = 0;
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        BIRKHOFF_UNROLL
        for (int r = 2 * half; r < 2 * half + 2; ++r) {
          s[j][r] = thread_.exp2(s[j][r] - shift);
          total += s[j][r];
        }
      }
      sum[half] = sum[half] * correction + total;
      BIRKHOFF_UNROLL
      for (int j = 0; j < Shape::kWarpColumns / 8; ++j) {
        out[j][2 * half] *= correction;
        out[j][2 * half + 1] *= correction;
      }
    }
  }

  // After the last tile: makes `sum` the sum of the whole row, and adds the sink (times log2(e)) to
  // it and to `maximum`. Returns the factor that brings `out` to the new maximum.
  BIRKHOFF_DEVICE float finish_softmax(float& maximum, float& sum, bool has_sink,
                                       float sink) const {
    sum += thread_.exchange(sum, 1);
    sum += thread_.exchange(sum, 2);
    if (!has_sink || sum == 0) return 1;
    const float largest = fmaxf(maximum, sink), correction = thread_.exp2(maximum - largest);
    sum = sum * correction + thread_.exp2(sink - largest);
    maximum = largest;
    return correction;
  }
};

}  // namespace birkhoff
