// The size of images whose values are u8 [rows, columns, channels], in that order.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace birkhoff {

struct ImageDims {
  std::int64_t rows = 0, columns = 0, channels = 0;

  // Of each: checkpoints hold no larger ones.
  static constexpr std::int64_t kMaxSize = 65536;

  std::int64_t values() const { return rows * columns * channels; }
  // "28 x 28 x 1".
  std::string text() const { return fmt::format("{} x {} x {}", rows, columns, channels); }
  friend bool operator==(const ImageDims&, const ImageDims&) = default;
};

}  // namespace birkhoff
