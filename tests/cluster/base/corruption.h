// Damage to files: which bits to flip, and random blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace birkhoff {

// BIRKHOFF_CORRUPTION=all: every bit, every length, 20,000 random damages.
inline bool all_corruption() {
  const char* which = std::getenv("BIRKHOFF_CORRUPTION");
  return which != nullptr && std::string_view(which) == "all";
}

// Which of a file's `count` bits or lengths to try: the first 512, the last 128 and every 37th in
// between, or all of them with BIRKHOFF_CORRUPTION=all.
inline std::vector<std::int64_t> places_to_try(std::int64_t count) {
  std::vector<std::int64_t> places;
  for (std::int64_t place = 0; place < count; ++place) {
    if (all_corruption() || place < 512 || place >= count - 128 || place % 37 == 0)
      places.push_back(place);
  }
  return places;
}

inline int num_random_damages() { return all_corruption() ? 20000 : 200; }

inline void flip_bit(const std::string& path, std::int64_t bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(bit / 8);
  const char byte = static_cast<char>(file.get() ^ (1 << (bit % 8)));
  file.seekp(bit / 8);
  file.put(byte);
}

// Different content of about the same size: a block zeroed, filled with noise, replaced by another
// block, or with words 0x0000 and 0xFFFF exchanged (which Fletcher's checksum does not detect); two
// blocks exchanged; the end cut off, or bytes appended.
inline std::string damaged(const std::string& good, std::mt19937& random) {
  const auto below = [&](std::size_t bound) { return random() % bound; };
  std::string bad = good;
  while (bad == good) {
    bad = good;
    const std::size_t length = 1 + below(std::min<std::size_t>(good.size() / 2, 65536));
    const std::size_t at = below(good.size() - length + 1), other = below(good.size() - length + 1);
    switch (below(7)) {
      case 0:
        bad.replace(at, length, length, '\0');
        break;
      case 1:
        for (std::size_t i = 0; i < length; ++i) bad[at + i] = static_cast<char>(random());
        break;
      case 2:
        bad.replace(at, length, good, other, length);
        break;
      case 3:
        for (std::size_t i = at & ~std::size_t{1}; i + 1 < at + length; i += 2) {
          const std::string_view word(good.data() + i, 2);
          if (word == std::string_view("\0\0", 2)) bad.replace(i, 2, "\xff\xff");
          if (word == "\xff\xff") bad.replace(i, 2, 2, '\0');
        }
        break;
      case 4:
        bad.replace(at, length, good, other, length);
        bad.replace(other, length, good, at, length);
        break;
      case 5:
        bad.resize(good.size() - length);
        break;
      default:
        for (std::size_t i = 0; i < length; ++i) bad += static_cast<char>(random());
    }
  }
  return bad;
}

}  // namespace birkhoff
