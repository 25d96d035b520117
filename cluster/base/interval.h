// Ranges of integers, and their division into nearly equal parts.
#pragma once

#include <cstdint>

namespace birkhoff {

struct Interval {
  std::int64_t begin = 0, end = 0;  // [begin, end)
  std::int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// Part `part` of [0, n), divided into `num_parts` consecutive, nearly equal parts.
inline Interval partition(std::int64_t n, std::int64_t part, std::int64_t num_parts) {
  return {n * part / num_parts, n * (part + 1) / num_parts};
}

}  // namespace birkhoff
