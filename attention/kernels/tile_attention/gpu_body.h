// A thread's share of tiles in shared memory, of their products on tensor cores and of the softmax:
// the common part of the kernels of block attention and of attention over gathered rows.
//
// `Thread` is GpuThread (cluster/base/gpu/gpu_thread.cuh), or its emulation on the CPU. A tile is
// kTileRows rows of kHeadDim 16-bit elements; rows that do not exist, and columns from the head dim
// on, are zeros. A warp owns 16 rows of one tile and kWarpColumns columns of a result.
#pragma once

#include <cstdint>
#include <limits>

#include "attention/kernels/common/gpu_dropout.h"
#include "attention/kernels/tile_attention/gpu_tiles.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kAllPairs = 0xffffffff;

// A lane's elements in its warp's 16 rows, for each 8 columns; place_in_c() says which. The columns
// are 8 kGroups rows of another tile.
template <int kGroups>
using LanePairs = float[kGroups][4];

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

  // The same where the columns are the warp's of a result.
  using Columns = float[Shape::kWarpColumns / 8][4];

  Thread thread_;
  const int lane_, first_row_, first_column_;  // the warp's

  // ---- Rows between global and shared memory, 16 bytes at a time.

  // Rows of head_dim elements, `stride` elements apart, to a tile; zeros for columns from head_dim
  // on and for rows from `all` on. Called by all threads of a tile; the rows have arrived after
  // wait() and a barrier.
  BIRKHOFF_DEVICE void load_rows(std::uint32_t tile, const std::uint16_t* rows, std::int64_t stride,
                                 int all, int head_dim) const {
    constexpr int kGroups = kHeadDim / 8, kRowsAtOnce = Shape::kThreads / kGroups;
    const int index = thread_.index() % Shape::kThreads, row = index / kGroups,
              column = index % kGroups * 8, count = column < head_dim ? all : 0;
    const std::uint16_t* from = rows + row * stride + column;
    const std::uint32_t to = tile + place_in_tile<kHeadDim>(row, column);
    static_assert(kRowsAtOnce % 8 == 0);
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < kTileRows; i += kRowsAtOnce) {
      thread_.template copy_async<16>(to + 2 * i * kHeadDim, from, i + row < count);
      from += kRowsAtOnce * stride;
    }
  }

  // Stores factor * c to the warp's columns of its rows before `all`. They pass through `tile`,
  // where no other warp uses them.
  BIRKHOFF_DEVICE void store_rows(const Columns& c, float factor, std::uint32_t tile,
                                  std::uint16_t* rows, std::int64_t stride, int all,
                                  int head_dim) const {
    constexpr int kGroups = Shape::kWarpColumns / 8;
    put_rows(tile, [&](int j, int r) { return c[j][r] * factor; });
    constexpr int kRowsAtOnce = 32 / kGroups;
    const int row = first_row_ + lane_ / kGroups, column = first_column_ + lane_ % kGroups * 8;
    const int count = column < head_dim ? all : 0;
    std::uint16_t* data = rows + row * stride + column;
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < 16; i += kRowsAtOnce) {
      if (row + i < count) {
        *reinterpret_cast<Words*>(data) =
            thread_.template load_shared<Words>(tile + place_in_tile<kHeadDim>(row + i, column));
      }
      data += kRowsAtOnce * stride;
    }
  }

  // Rounds value(j, r), the elements of the warp's Columns, into its rows and columns of a tile in
  // shared memory, where its lanes then see them.
  template <typename Value>
  BIRKHOFF_DEVICE void put_rows(std::uint32_t tile, Value value) const {
    const Place place_in = place_in_c(lane_, 0);
    const std::uint32_t to =
        tile + place_in_tile<kHeadDim>(first_row_ + place_in.row, first_column_ + place_in.column);
    BIRKHOFF_UNROLL
    for (int j = 0; j < Shape::kWarpColumns / 8; ++j) {
      const std::uint32_t place_j = further_right(to, 8 * j);
      thread_.store_shared(place_j, thread_.pack(value(j, 0), value(j, 1)));
      thread_.store_shared(place_j + 2 * 8 * kHeadDim, thread_.pack(value(j, 2), value(j, 3)));
    }
    thread_.sync_warp();
  }

  // ---- Products.

  // c_ij += sum_d a_id b_jd for the warp's rows i of tile a and rows [first_j, first_j + 8 kGroups)
  // of tile b.
  template <int kGroups>
  BIRKHOFF_DEVICE void multiply_rows(LanePairs<kGroups>& c, std::uint32_t a_tile,
                                     std::uint32_t b_tile, int first_j) const {
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
  // The same with the warp's rows of tile a in registers, for tiles a that meet many tiles b.
  using OwnRows = std::uint32_t[kHeadDim / 16][4];
  BIRKHOFF_DEVICE void load_own_rows(OwnRows& a, std::uint32_t a_tile) const {
    const Place down = downwards(lane_);
    a_tile += place_in_tile<kHeadDim>(first_row_ + down.row, down.column);
    BIRKHOFF_UNROLL
    for (int d = 0; d < kHeadDim; d += 16) {
      thread_.template load_matrices<false>(a[d / 16], further_right(a_tile, d));
    }
  }
  template <int kGroups>
  BIRKHOFF_DEVICE void multiply_rows(LanePairs<kGroups>& c, const OwnRows& a, std::uint32_t b_tile,
                                     int first_j) const {
    const Place right = rightwards(lane_);
    b_tile += place_in_tile<kHeadDim>(first_j + right.row, right.column);
    BIRKHOFF_UNROLL
    for (int d = 0; d < kHeadDim; d += 16) {
      BIRKHOFF_UNROLL
      for (int j = 0; j < kGroups; j += 2) {
        std::uint32_t b[4];
        thread_.template load_matrices<false>(b, further_right(b_tile, d) + 2 * 8 * j * kHeadDim);
        thread_.multiply(c[j], a[d / 16], b[0], b[1]);
        thread_.multiply(c[j + 1], a[d / 16], b[2], b[3]);
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
  BIRKHOFF_DEVICE void multiply_columns(Columns& c, const LanePairs<kGroups>& a,
                                        std::uint32_t x_tile, int first_j) const {
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

  // ---- Pairs of queries and keys.

  // The query and the key, in their tiles, of element i of a lane's pairs.
  template <bool kKeysAreRows>
  BIRKHOFF_DEVICE void place_of_pair(int i, int& query, int& key) const {
    const Place place = place_in_c(lane_, i % 4);
    const int row = first_row_ + place.row, column = i / 4 * 8 + place.column;
    query = kKeysAreRows ? column : row;
    key = kKeysAreRows ? row : column;
  }

  // Bit i: does dropout keep the probability of element i, of the pairs of two whole tiles?
  // element(query, key) is the number of the pair's noise.
  template <bool kKeysAreRows, typename Element>
  BIRKHOFF_DEVICE std::uint32_t kept_pairs(const DropoutParams& dropout, const SampleNoise& noise,
                                           Element element) const {
    if (dropout.p == 0) return kAllPairs;
    std::uint32_t bits = 0;
    PhiloxBlock four{};
    BIRKHOFF_UNROLL_BY(1)
    for (int i = 0; i < 32; ++i) {
      int query, key;
      place_of_pair<kKeysAreRows>(i, query, key);
      const auto number = static_cast<std::uint64_t>(element(query, key));
      // Elements come in pairs of columns; two neighboring keys of a query mostly share four.
      if (kKeysAreRows || i % 2 == 0 || number % 4 == 0) four = noise.four_around(number);
      bits |= static_cast<std::uint32_t>(SampleNoise::keeps(dropout, four, number)) << i;
    }
    return bits;
  }

  // ---- Numbers of a query for each of `rows` rows of a table of relative positions
  // (DistanceParams); queries are rows.

  // Joins the elements of the lane's row of `half` that are not 0 to the query's numbers, which are
  // `none` where nothing was joined; not of a query that does not exist, whose elements may be NaN.
  // row_of(column) is the table's row. Only the first and the last row, to which distances are
  // clipped, have more than one key of a query: four lanes add those up.
  template <int kGroups, typename RowOf, typename Join>
  BIRKHOFF_DEVICE void join_by_distance(const LanePairs<kGroups>& x, int half, bool exists,
                                        float* numbers, int rows, float none, RowOf row_of,
                                        Join join) const {
    float at_first = 0, at_last = 0;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 2 * kGroups; ++i) {
      const float value = x[i / 2][2 * half + i % 2];
      if (value == 0 || !exists) continue;
      const int row = row_of(i / 2 * 8 + place_in_c(lane_, i % 2).column);
      if (row == 0) {
        at_first += value;
      } else if (row == rows - 1) {
        at_last += value;
      } else {
        numbers[row] = join(none, value);
      }
    }
    at_first = row_sum(at_first);
    at_last = row_sum(at_last);
    if (lane_ % 4 != 0) return;
    if (at_first != 0) numbers[0] = join(numbers[0], at_first);
    if (at_last != 0) numbers[rows - 1] = join(numbers[rows - 1], at_last);
  }
  // The logarithm of a sum, which begins as -infinity, and an exponential relative to `maximum`: a
  // later maximum need not rescale it.
  BIRKHOFF_DEVICE float logarithm_of(float number, float value, float maximum) const {
    return thread_.log2(thread_.exp2(number - maximum) + value) + maximum;
  }
  // After the last tile: turns a row's logarithms into probabilities. A maximum of -infinity counts
  // as 0.
  BIRKHOFF_DEVICE void take_probabilities(float* numbers, int rows, float maximum,
                                          float inverse_sum) const {
    const float shift = maximum == -kInfinity ? 0 : maximum;
    for (int r = lane_ % 4; r < rows; r += 4) {
      numbers[r] = thread_.exp2(numbers[r] - shift) * inverse_sum;
    }
  }

  // The sum over the four lanes that share a row; each of them has it.
  BIRKHOFF_DEVICE float row_sum(float x) const {
    x += thread_.exchange(x, 1);
    return x + thread_.exchange(x, 2);
  }

  // Turns logits into exp(s - maximum), with the maximum over all keys so far, and rescales the
  // earlier sums to the new maximum. `sum` covers only this lane's columns.
  BIRKHOFF_DEVICE void take_softmax(LanePairs<kTileRows / 8>& s, float (&maximum)[2],
                                    float (&sum)[2], Columns& out) const {
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
    sum = row_sum(sum);
    if (!has_sink || sum == 0) return 1;
    const float largest = fmaxf(maximum, sink), correction = thread_.exp2(maximum - largest);
    sum = sum * correction + thread_.exp2(sink - largest);
    maximum = largest;
    return correction;
  }

  // Turns logits into the factors of d_out in d_v, and products d_out . v into d_s, where queries
  // are columns. At `numbers` lie their maxima (times `log2_e` they have the unit of the logits),
  // then their inverse sums and delta. dropout(i) is the factor of element i.
  template <int kGroups, typename Dropout>
  BIRKHOFF_DEVICE void take_gradient(LanePairs<kGroups>& p, LanePairs<kGroups>& d_s,
                                     std::uint32_t numbers, float log2_e, Dropout dropout) const {
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups; ++j) {
      BIRKHOFF_UNROLL
      for (int c = 0; c < 2; ++c) {
        const std::uint32_t at = numbers + 4 * (8 * j + place_in_c(lane_, c).column);
        const float maximum = log2_e * thread_.template load_shared<float>(at);
        const float inverse_sum = thread_.template load_shared<float>(at + Shape::kNumbersBytes);
        const float delta = thread_.template load_shared<float>(at + 2 * Shape::kNumbersBytes);
        BIRKHOFF_UNROLL
        for (int r = c; r < 4; r += 2) {
          const float share = thread_.exp2(p[j][r] - maximum) * inverse_sum;
          const float factor = dropout(4 * j + r);
          d_s[j][r] = share * (d_s[j][r] * factor - delta);
          p[j][r] = share * factor;
        }
      }
    }
  }
};

}  // namespace birkhoff
