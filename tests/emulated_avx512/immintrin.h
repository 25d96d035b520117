// AVX-512's and AMX's products of bf16 for any processor: with this folder in front of the
// compiler's headers and __AVX512F__, __AVX512BF16__ and, for AMX, __AMX_BF16__ defined, tests
// compile the sources of our kernels. Vectors of 64 bytes are the compiler's own. What instructions
// compute: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

using __m512 [[gnu::vector_size(64)]] = float;
using __m512bh [[gnu::vector_size(64)]] = std::int16_t;
using __m256bh [[gnu::vector_size(32)]] = std::int16_t;

inline float emulated_float_of(std::int16_t bf16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::uint16_t>(bf16)) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
// Rounded to nearest, ties to even; NaN stays NaN.
inline std::int16_t emulated_bf16_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const std::uint32_t rounded = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<std::int16_t>(rounded >> 16);
}

// sum + the product of each pair.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  for (int i = 0; i < 16; ++i) {
    sum[i] += emulated_float_of(a[2 * i + 1]) * emulated_float_of(b[2 * i + 1]);
    sum[i] += emulated_float_of(a[2 * i]) * emulated_float_of(b[2 * i]);
  }
  return sum;
}

// `low`, then `high`.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  __m512bh result;
  for (int i = 0; i < 16; ++i) {
    result[i] = emulated_bf16_of(low[i]);
    result[16 + i] = emulated_bf16_of(high[i]);
  }
  return result;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
  __m256bh result;
  for (int i = 0; i < 16; ++i) result[i] = emulated_bf16_of(x[i]);
  return result;
}

// AMX's registers of a thread: matrices whose shapes LDTILECFG sets. Without them, or beyond eight
// registers, the CPU ends the process; so does the emulation.
struct EmulatedTiles {
  struct Shape {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } shape{};
  std::int16_t bf16[8][16][32] = {};  // or floats

  void use(int tile) const {
    if (shape.palette != 1 || tile > 7 || shape.rows[tile] == 0 || shape.rows[tile] > 16 ||
        shape.row_bytes[tile] == 0 || shape.row_bytes[tile] > 64) {
      __builtin_trap();
    }
  }
  float sum(int tile, int row, int column) const {
    float x;
    std::memcpy(&x, &bf16[tile][row][2 * column], sizeof(x));
    return x;
  }
};
inline thread_local EmulatedTiles emulated_tiles;

inline void _tile_loadconfig(const void* config) {
  emulated_tiles = {};
  std::memcpy(&emulated_tiles.shape, config, 64);
}
inline void _tile_release() { emulated_tiles = {}; }
inline void _tile_zero(int tile) {
  emulated_tiles.use(tile);
  std::memset(emulated_tiles.bf16[tile], 0, sizeof(emulated_tiles.bf16[tile]));
}
inline void _tile_loadd(int tile, const void* from, long stride) {
  _tile_zero(tile);
  const auto& shape = emulated_tiles.shape;
  for (int row = 0; row < shape.rows[tile]; ++row) {
    std::memcpy(emulated_tiles.bf16[tile][row], static_cast<const char*>(from) + row * stride,
                shape.row_bytes[tile]);
  }
}
inline void _tile_stored(int tile, void* to, long stride) {
  emulated_tiles.use(tile);
  const auto& shape = emulated_tiles.shape;
  for (int row = 0; row < shape.rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles.bf16[tile][row],
                shape.row_bytes[tile]);
  }
}
// sums += a b. Products of the first and of the second number of each pair have sums of their own.
inline void _tile_dpbf16ps(int sums, int a, int b) {
  EmulatedTiles& tiles = emulated_tiles;
  for (const int tile : {sums, a, b}) tiles.use(tile);
  const int depth = tiles.shape.row_bytes[a] / 4;
  if (sums == a || sums == b || a == b || tiles.shape.rows[b] != depth ||
      tiles.shape.rows[a] != tiles.shape.rows[sums] ||
      tiles.shape.row_bytes[b] != tiles.shape.row_bytes[sums]) {
    __builtin_trap();
  }
  for (int m = 0; m < tiles.shape.rows[sums]; ++m) {
    for (int n = 0; n < tiles.shape.row_bytes[sums] / 4; ++n) {
      float part[2] = {};
      for (int k = 0; k < depth; ++k) {
        for (int i = 0; i < 2; ++i) {
          part[i] += emulated_float_of(tiles.bf16[a][m][2 * k + i]) *
                     emulated_float_of(tiles.bf16[b][k][2 * n + i]);
        }
      }
      const float sum = tiles.sum(sums, m, n) + (part[0] + part[1]);
      std::memcpy(&tiles.bf16[sums][m][2 * n], &sum, sizeof(sum));
    }
  }
}
