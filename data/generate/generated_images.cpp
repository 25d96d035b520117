#include "data/generate/generated_images.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cluster/base/random/philox.h"

namespace birkhoff::generated_images {
namespace {

// The colors are given at every 16th pixel and interpolated between.
constexpr std::int64_t kCell = 16, kKnots = kSide / kCell + 1;
// Counters of an image's blocks of random bits.
constexpr std::uint64_t kClassBlock = 0, kColorBlocks = 1, kNoiseBlocks = 1 << 10;

// Fills `bytes`, a multiple of 16, with random bits.
void fill(std::uint64_t seed, std::int64_t number, std::uint64_t block, std::uint8_t* out,
          std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 16) {
    const auto words = philox(seed, static_cast<std::uint64_t>(number), block++);
    std::memcpy(out + at, words.data(), 16);
  }
}

}  // namespace

void make_image(std::uint64_t seed, std::int64_t number, std::uint8_t* out) {
  std::array<std::uint8_t, 80> knots;  // [kKnots, kKnots, kChannels]
  static_assert(kKnots * kKnots * kChannels <= 80);
  fill(seed, number, kColorBlocks, knots.data(), knots.size());
  fill(seed, number, kNoiseBlocks, out, kBytes);
  constexpr std::int64_t kRow = kKnots * kChannels;
  for (std::int64_t y = 0; y < kSide; ++y) {
    const std::uint8_t* above = knots.data() + y / kCell * kRow;
    std::array<int, kRow> column;
    for (std::int64_t i = 0; i < kRow; ++i) {
      const auto below_part = static_cast<int>(y % kCell);
      column[static_cast<std::size_t>(i)] =
          above[i] * (kCell - below_part) + above[i + kRow] * below_part;
    }
    for (std::int64_t x = 0; x < kSide; ++x) {
      const int* left = column.data() + x / kCell * kChannels;
      const auto right_part = static_cast<int>(x % kCell);
      for (std::int64_t c = 0; c < kChannels; ++c, ++out) {
        const int smooth = static_cast<int>(
            (left[c] * (kCell - right_part) + left[c + kChannels] * right_part) / (kCell * kCell));
        *out = static_cast<std::uint8_t>(std::clamp(smooth + (*out & 7) - 4, 0, 255));
      }
    }
  }
}

std::uint16_t class_of(std::uint64_t seed, std::int64_t number) {
  const auto words = philox(seed, static_cast<std::uint64_t>(number), kClassBlock);
  return static_cast<std::uint16_t>(words[0] % kClasses);
}

}  // namespace birkhoff::generated_images
