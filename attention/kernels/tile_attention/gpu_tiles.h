// Tiles of rows on the tensor cores of a GPU: sizes, and the layout of their elements in lanes. For
// both g++ and nvcc: no LibTorch here.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// Rows per tile: 16 for each of four warps. 64 is the usual block size.
constexpr int kTileRows = 64;
// Columns of a product of two tiles that a backward kernel computes at once: more would not fit
// into registers together with the results.
constexpr int kAtOnce = 32;

// Sizes for head dims up to kHeadDim (64, 128 or 256), for host and device.
template <int kHeadDim>
struct GpuTileShape {
  // Columns of a result that one warp keeps in registers; two warps share the rows of wider
  // results.
  static constexpr int kWarpColumns = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kWarpsOfRow = kHeadDim / kWarpColumns;
  // Threads that share the rows of a tile.
  static constexpr int kThreads = kWarpsOfRow * kTileRows / 16 * 32;
  // Tiles in flight. With 2, the next tile loads while the current one is in use.
  static constexpr int kForwardStages = 2;
  static constexpr int kBackwardStages = kHeadDim <= 128 ? 2 : 1;

  // Bytes of a tile of rows, of a tile of probabilities, and of one value per row.
  static constexpr int kRowsBytes = kTileRows * kHeadDim * 2;
  static constexpr int kPairsBytes = kTileRows * kTileRows * 2;
  static constexpr int kNumbersBytes = kTileRows * 4;

  // Of a thread block on sm_80. The thread blocks of a multiprocessor share 164 KiB (sm_80) or 228
  // KiB (sm_90), of which each of them loses 1 KiB.
  static constexpr int kMaxBytes = 163 * 1024;
};

// Calls f<kHeadDim>() with the kHeadDim of this head dim.
template <typename Function>
void with_head_dim(int head_dim, Function f) {
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 128) return f.template operator()<128>();
  f.template operator()<256>();
}

// Calls f<flag>().
template <typename Function>
void with_flag(bool flag, Function f) {
  if (flag) return f.template operator()<true>();
  f.template operator()<false>();
}

// ---- Positions (PTX ISA, sections "Matrix Fragments for mma.m16n8k16" and "ldmatrix").

struct Place {
  int row, column;
};

// The position of element i of a lane in a 16 x 8 result. A 16 x 16 left operand consists of two
// such halves: elements 0 to 3 of the left half, then of the right half, two per register.
BIRKHOFF_HOST_DEVICE constexpr Place place_in_c(int lane, int i) {
  return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}

// The position to which a lane points ldmatrix.x4 for 16 x 16 elements in shared memory: lane 8i +
// r points to row r of the i-th 8 x 8 matrix. The second matrix lies below the first (downwards) or
// to its right (rightwards).
BIRKHOFF_HOST_DEVICE constexpr Place downwards(int lane) { return {lane % 16, lane / 16 * 8}; }
BIRKHOFF_HOST_DEVICE constexpr Place rightwards(int lane) {
  return {lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8};
}

// Byte offset of an element in its tile. The groups of 8 elements (16 bytes) of a row are permuted
// so that one group of 8 neighboring rows covers all 32 banks.
template <int kColumns>
BIRKHOFF_HOST_DEVICE constexpr std::uint32_t place_in_tile(int row, int column) {
  static_assert(kColumns % 64 == 0);
  return static_cast<std::uint32_t>(2 *
                                    (row * kColumns + ((column / 8) ^ (row % 8)) * 8 + column % 8));
}

// `place` moved right by `columns`, in bytes. One register and exclusive ors with constants then
// give all positions of a row. `columns` is a multiple of 8 whose bits are not set in the column of
// `place`; the address that `place` counts from is a multiple of 128.
BIRKHOFF_HOST_DEVICE constexpr std::uint32_t further_right(std::uint32_t place, int columns) {
  return (place ^ static_cast<std::uint32_t>(columns % 64 * 2)) +
         static_cast<std::uint32_t>(columns / 64 * 128);
}

}  // namespace birkhoff
