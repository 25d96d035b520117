// Products of bf16 by AMX, whose registers hold matrices: 16 rows of up to 64 bytes. A register of
// sums is 16 x 16 floats, one of `a` 16 rows of pairs along the depth, one of `b` as many stacked
// rows of 16 pairs: the layouts of cpu_pair.h. Empty without AMX. Included by files that are
// compiled with different flags from the rest: nothing here has external linkage.
#pragma once

#include "attention/kernels/common/cpu_products.h"

namespace birkhoff {
namespace {

constexpr int kAmxRows = 16;

#if defined(__AMX_BF16__)

// Whether products of E use AMX where amx_depth() finds that their sizes fit.
template <typename E>
constexpr bool kUsesAmx = std::is_same_v<E, Bf16Pair>;

// The operand of LDTILECFG. Registers 0 to 3 are sums, 4 is of `a`, 5 and 6 are of `b`.
struct AmxShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
constexpr AmxShapes amx_shapes(int depth) {
  AmxShapes shapes;
  for (int i = 0; i < 7; ++i) {
    shapes.row_bytes[i] = i == 4 ? static_cast<std::uint16_t>(4 * depth) : 64;
    shapes.rows[i] = i > 4 ? static_cast<std::uint8_t>(depth) : kAmxRows;
  }
  return shapes;
}
// In memory, because GCC's intrinsic names only the first bytes as its input.
constexpr AmxShapes kAmxShapes[] = {amx_shapes(8), amx_shapes(16)};

// While it exists, the thread's registers have shapes for `depth` (8 or 16) pairs. 0: does nothing.
class AmxRegisters {
 public:
  explicit AmxRegisters(int depth) : used_(depth > 0) {
    if (used_) _tile_loadconfig(&kAmxShapes[depth == 16]);
  }
  ~AmxRegisters() {
    if (used_) _tile_release();
  }
  AmxRegisters(const AmxRegisters&) = delete;

 private:
  bool used_;
};

// multiply_amx() for kCount registers of columns. The arguments of intrinsics are literals.
template <int kCount>
void multiply_amx_block(int step, const Bf16Pair* a, std::ptrdiff_t a_row, const Bf16Pair* b,
                        std::ptrdiff_t b_row, int depth, float* c, std::ptrdiff_t c_row,
                        bool accumulate) {
  const std::ptrdiff_t a_bytes = 4 * a_row, b_bytes = 4 * b_row, c_bytes = 4 * c_row;
  // GCC's intrinsics do not say that they read memory.
  asm volatile("" ::: "memory");
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kCount > 1) _tile_loadd(1, c + 16, c_bytes);
    if constexpr (kCount > 2) _tile_loadd(2, c + 32, c_bytes);
    if constexpr (kCount > 3) _tile_loadd(3, c + 48, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kCount > 1) _tile_zero(1);
    if constexpr (kCount > 2) _tile_zero(2);
    if constexpr (kCount > 3) _tile_zero(3);
  }
  for (int k = 0; k < depth; k += step) {
    const Bf16Pair* b_k = b + k * b_row;
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(5, b_k, b_bytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kCount > 1) {
      _tile_loadd(6, b_k + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(5, b_k + 32, b_bytes);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(6, b_k + 48, b_bytes);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kCount > 1) _tile_stored(1, c + 16, c_bytes);
  if constexpr (kCount > 2) _tile_stored(2, c + 32, c_bytes);
  if constexpr (kCount > 3) _tile_stored(3, c + 48, c_bytes);
}

// Computes c (+)= a b for kAmxRows rows and a multiple of 16 columns. Strides and depth count pairs
// (of c, floats); depth is a multiple of `step`, for which AmxRegisters exist.
inline void multiply_amx(int step, const Bf16Pair* a, std::ptrdiff_t a_row, const Bf16Pair* b,
                         std::ptrdiff_t b_row, int depth, float* c, std::ptrdiff_t c_row,
                         int columns, bool accumulate) {
  constexpr void (*kBlocks[])(int, const Bf16Pair*, std::ptrdiff_t, const Bf16Pair*, std::ptrdiff_t,
                              int, float*, std::ptrdiff_t, bool) = {
      multiply_amx_block<1>, multiply_amx_block<2>, multiply_amx_block<3>, multiply_amx_block<4>};
  for (int n = 0; n < columns; n += 64) {
    kBlocks[min_of(columns - n, 64) / 16 - 1](step, a, a_row, b + n, b_row, depth, c + n, c_row,
                                              accumulate);
  }
}

#else

template <typename E>
constexpr bool kUsesAmx = false;
struct AmxRegisters {
  explicit AmxRegisters(int) {}
};

#endif

// The number of pairs that a register holds along the depth of the products of a pair of tiles. 8
// keeps the blocks of 16 x 16 scores that a causal pair leaves out. 0: no AMX, because sizes are
// not multiples of 16.
template <typename E>
inline int amx_depth([[maybe_unused]] int queries, [[maybe_unused]] int keys,
                     [[maybe_unused]] int head_dim, [[maybe_unused]] bool causal) {
  if constexpr (kUsesAmx<E>) {
    const int sizes = queries | keys | head_dim;
    return sizes % 16 ? 0 : sizes % 32 || causal ? 8 : 16;
  } else {
    return 0;
  }
}

}  // namespace
}  // namespace birkhoff
